"""Configuration: frozen sections of flags, parsed, resolved and validated once."""

from slime.config.parser import FlagGroup, FlagOwner, parse_args
from slime.config.resolve import resolve
from slime.config.schema import Config
from slime.config.validate import validate

__all__ = ["Config", "FlagGroup", "FlagOwner", "parse_args", "resolve", "validate"]
