"""Import path of slime plug-ins: see slime.data.prompts and slime.data.files."""

from slime.data.files import split_slice as _parse_generalized_path
from slime.data.prompts import filter_long_prompt, read_file

__all__ = ["_parse_generalized_path", "filter_long_prompt", "read_file"]
