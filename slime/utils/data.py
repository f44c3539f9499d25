"""Prompt files under the path that slime plug-ins use."""

from slime.data.prompts import filter_long_prompt, read_file

__all__ = ["filter_long_prompt", "read_file"]
