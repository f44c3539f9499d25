"""Reads `--config FILE.yaml`: flags of a run as a YAML mapping. Owns the form of the file, but not its flags.

    colocate: true                 a switch; false is --no-colocate
    lr: 1e-6                       a value
    eval-prompt-data: [a, a.jsonl] several values
    train-env-vars: {A: "1"}       a JSON object
    load: null                     not given

Keys are flags without the leading dashes. Dashes and underscores mean the same. A flag on the command line replaces the
same flag in a file, and a later file replaces flags of an earlier file. Paths are relative to the current directory.
Booleans are true and false only: `off` is a word here, as on the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from slime.config.fields import spelled
from slime.config.peer_names import parse_override
from slime.records.errors import FlagError

CONFIG = "config"


YAML_ERRORS = (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError)
"""Exceptions of PyYAML for an invalid text. Tags such as !!bool, and dates such as 2026-99-99, raise Python's own
errors."""


class YamlLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Loads plain data, with the booleans of YAML 1.2."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":bool")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("true|false", re.IGNORECASE), list("tTfF")
)


@dataclass(frozen=True)
class FlagGroup:
    """One flag as typed, its name (no leading dashes, underscores inside), and the strings after it. A flag from a file
    also has the file and line."""

    typed: str
    name: str
    values: list[str]
    origin: str = ""

    @property
    def tokens(self) -> list[str]:
        """Returns the flag as typed on a command line."""
        if len(self.values) == 1 and self.values[0].startswith("--"):
            return [f"{self.typed}={self.values[0]}"]
        return [self.typed, *self.values]

    @property
    def positive(self) -> str:
        """Returns the name without the prefix `no_`."""
        return self.name.removeprefix("no_")


def split_argv(argv: Sequence[str]) -> list[FlagGroup]:
    """Splits `--flag value ...` and `--flag=value` into groups. A token before the first flag is an error.

    A setting in Hydra's spelling is a group, too, so that its error names the flag of this project.
    """
    groups: list[FlagGroup] = []
    for token in argv:
        token = "--verbose" if token == "-v" else token
        if (override := parse_override(token)) is not None:
            groups.append(FlagGroup(override[0], override[0], [override[1]]))
        elif token.startswith("--") and len(token) > 2:
            typed, equals, value = token.partition("=")
            groups.append(FlagGroup(typed, typed[2:].replace("-", "_"), [value] if equals else []))
        elif groups:
            groups[-1].values.append(token)
        else:
            raise FlagError(
                "arguments", "start with a flag", f"{token!r}", "every option is spelled --name value"
            )
    return groups


def yaml_group(key: str, value: object, origin: str = "") -> FlagGroup:
    """Converts a YAML entry to the equivalent command-line tokens. `false` becomes `--no-...`."""
    name = key.removeprefix("--").replace("-", "_")
    if isinstance(value, bool):
        name = name if value else f"no_{name}"
        return FlagGroup(spelled(name), name, [], origin)
    where = f"{origin}: {key}" if origin else key
    values: list[object] = value if isinstance(value, list) else [value]
    if isinstance(value, dict):
        try:
            values = [json.dumps(value)]
        except (TypeError, ValueError) as error:  # ValueError: the value contains itself
            raise FlagError(where, "be a mapping that JSON can hold", value, "quote its values") from error
    elif any(v is None or isinstance(v, list | dict) for v in values):
        raise FlagError(where, "be a list of words or numbers", value, "write each entry as one")
    return FlagGroup(spelled(name), name, [str(v) for v in values], origin)


def with_config_files(groups: Sequence[FlagGroup]) -> list[FlagGroup]:
    """Returns the flags of every `--config` file, then the flags of the command line. Raises ValueError with file and
    line.

    A flag in a later file or on the command line replaces all its earlier uses.
    """
    own = [group for group in groups if group.name != CONFIG]
    layers = []
    for group in groups:
        if group.name == CONFIG:
            if not group.values:
                raise FlagError(group.typed, "name a YAML file", "none", "give its path")
            layers += [read_config_file(Path(name), group.typed) for name in group.values]
    layers.append(own)
    merged: list[FlagGroup] = []
    for layer in layers:
        present = {group.positive for group in layer}
        merged = [group for group in merged if group.positive not in present] + layer
    return merged


def expand_config(argv: Sequence[str]) -> list[str]:
    """Returns the equivalent command line without `--config`."""
    return [token for group in with_config_files(split_argv(argv)) for token in group.tokens]


def read_config_file(path: Path, flag: str = "--config") -> list[FlagGroup]:
    """Returns the entries of a file in order, without null entries. Raises ValueError if the file is not a mapping of
    flags."""
    if not path.is_file():
        raise FlagError(flag, "name a YAML file that exists", path, "check the path")
    try:
        loader = YamlLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
    except YAML_ERRORS as error:
        raise ValueError(f"{path} must be valid YAML, got: {error}") from error
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise FlagError(path, "be a mapping of flag: value", f"a {node.tag.rpartition(':')[2]}")
    return _entries(loader, node, path)


def _entries(loader: yaml.SafeLoader, node: yaml.MappingNode, path: Path) -> list[FlagGroup]:
    groups, lines = [], dict[str, int]()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        try:
            key, value = loader.construct_object(key_node, True), loader.construct_object(value_node, True)
        except YAML_ERRORS as error:
            raise ValueError(f"{path}, line {line} must be valid YAML, got: {error}") from error
        group = yaml_group(str(key), "" if value is None else value, f"{path}, line {line}")
        if group.positive in lines:
            raise FlagError(
                f"{path}, line {line}: {key}",
                "be given once",
                f"it in line {lines[group.positive]}, too",
                "remove one of the two lines",
            )
        if group.name == CONFIG:
            raise FlagError(
                f"{path}, line {line}: {key}",
                "not be in a file",
                advice="give several --config on the command line",
            )
        lines[group.positive] = line
        if value is not None:
            groups.append(group)
    return groups
