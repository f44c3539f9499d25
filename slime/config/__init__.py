"""Configuration: frozen sections of flags, parsed, resolved and validated once."""

from slime.config.backend import BackendFlags, FlagOwner
from slime.config.config_file import FlagGroup
from slime.config.parser import parse_args
from slime.config.resolve import resolve
from slime.config.schema import Config, Flags
from slime.config.validate import validate

__all__ = ["BackendFlags", "Config", "FlagGroup", "FlagOwner", "Flags", "parse_args", "resolve", "validate"]
