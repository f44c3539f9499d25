"""Defines the configuration: frozen sections of flags, and the files and words with their values.

It does not depend on a feature; the rules are in `slime.rules`.
"""

from slime.config.config_file import FlagGroup
from slime.config.schema import Config, read_section

__all__ = ["Config", "FlagGroup", "read_section"]
