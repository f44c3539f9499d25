"""Configuration on the ground floor: frozen sections of flags, and the files and words that give them values. It knows
no feature: rules are in `slime.rules`."""

from slime.config.config_file import FlagGroup
from slime.config.schema import Config, section_of

__all__ = ["Config", "FlagGroup", "section_of"]
