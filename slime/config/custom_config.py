"""Reads the file of --custom-config-path. Owns its form, and the use of keys that are not flags.

slime sets every key as an attribute of `args`. A key that is a flag is read as that flag. Every other key is a setting
of the user's hooks, which find it in their `args`, with the value of the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slime.config.config_file import YAML_ERRORS, FlagGroup
from slime.config.fields import Values
from slime.config.near_names import nearest
from slime.records.errors import FlagError


def custom_entries(groups: list[FlagGroup]) -> Values:
    """Returns name (with underscores) -> value, in the order of the file of the last --custom-config-path. The result
    is empty without the flag.

    Raises ValueError if the file is missing, not YAML, not a mapping, or has a value that JSON cannot hold (a date).
    """
    paths = [g.values for g in groups if g.name == "custom_config_path"]
    if not paths:
        return {}
    import yaml

    path = Path(paths[-1][0]) if paths[-1] else Path()
    if not path.is_file():
        raise FlagError("--custom-config-path", "name a YAML file", path, "check the path")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except YAML_ERRORS as error:
        raise FlagError("--custom-config-path", "be valid YAML", f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise FlagError("--custom-config-path", "hold one mapping of flag: value", type(content).__name__)
    for key, value in content.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:  # ValueError: the value contains itself
            raise FlagError(
                "--custom-config-path", "hold values that JSON can hold", f"{key}: {value}", "quote the value"
            ) from error
    return {str(key).removeprefix("--").replace("-", "_"): value for key, value in content.items()}


def settings_note(settings: Values, known: Sequence[str]) -> str:
    """Returns a note on the keys that are not flags. A key that is similar to a flag is listed with that flag."""
    near = "".join(f" ({key}{hint})" for key in settings if (hint := nearest(key, known, words=False)))
    return f"--custom-config-path: {', '.join(settings)}: no flags, so hooks find them in args{near}"
