"""Import path of slime plug-ins: see slime.data.prompts, slime.data.files and slime.data.data_source."""

from slime.data.data_source import Dataset
from slime.data.files import split_slice as _parse_generalized_path
from slime.data.limits.samples import filter_long_prompt
from slime.data.prompts import read_file
from slime.system.upstream import refused_names

__all__ = ["Dataset", "_parse_generalized_path", "filter_long_prompt", "read_file"]
__getattr__ = refused_names("slime.utils.data")
