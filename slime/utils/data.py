"""Import path of slime plug-ins: see slime.data.prompts."""

from slime.data.prompts import filter_long_prompt, read_file

__all__ = ["filter_long_prompt", "read_file"]
