"""Turns a command line into a checked configuration: parse, resolve, validate. It may import any feature of slime that
needs no torch."""

from slime.rules.backend import BackendFlags, FlagOwner
from slime.rules.parser import parse_args
from slime.rules.resolve import resolve
from slime.rules.validate import validate

__all__ = ["BackendFlags", "FlagOwner", "parse_args", "resolve", "validate"]
