"""`vime config FILE`: prints the flags of a run, from files and command line, as YAML or as a shell array.

`--config` reads the YAML. The shell form defines an array: source <(vime config FILE --format shell), then
vime train "${VIME_FLAGS[@]}".
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence

import yaml

from slime.config import Config
from slime.config.config_file import (
    YAML_ERRORS,
    FlagGroup,
    YamlLoader,
    split_argv,
    with_config_files,
    yaml_group,
)
from slime.rules.flags import own_flags
from vime.backends import check_each, parse_config

ARRAY = "VIME_FLAGS"


USAGE = """usage: vime config FILE ... [FLAGS of vime train] [--format yaml|shell] [--all]

Print the flags that a run would use: those of the files, replaced by those of the command line.
--format shell prints a bash array; --all adds this project's flags at their defaults, and checks the whole."""


def main(argv: Sequence[str]) -> int:
    """Prints the flags. Raises ValueError for an unknown flag, and with --all also for flags that contradict each
    other."""
    if not argv or any(token in ("-h", "--help") for token in argv):
        print(USAGE)
        return 0
    files = list(itertools.takewhile(lambda token: not token.startswith("--"), argv))
    groups = split_argv(argv[len(files) :])
    options = {group.name: group.values for group in groups if group.name in ("format", "all")}
    form = options.get("format", ["yaml"])
    if form not in (["yaml"], ["shell"]):
        raise ValueError(f"--format must be yaml or shell, got {' '.join(form) or 'none'}")
    flags = [token for name in files for token in ("--config", name)]
    flags += [token for group in groups if group.name not in options for token in group.tokens]
    groups = with_config_files(split_argv(flags))
    if "all" in options:
        named = {group.positive for group in groups}
        groups += [group for group in defaults(parse_config(flags)) if group.positive not in named]
    else:
        check_each(flags)
    print(as_shell(groups) if form == ["shell"] else as_yaml(groups), end="")
    return 0


def defaults(config: Config) -> Iterator[FlagGroup]:
    """Yields every flag of this project with a resolved value, except the run directory, whose name contains the
    time."""
    for name, spec in own_flags().items():
        value = config.get_value(name)
        if (
            value is None
            or spec.secret
            or name == "run_dir"
            or (value in ([], {}, False) and value == spec.default)
        ):
            continue
        yield yaml_group(name, value)


def all_flags(config: Config) -> Iterator[FlagGroup]:
    """Yields every flag of a configuration that was made before: those of this project, of Megatron, of the engine, and
    the run directory. A command line with these flags makes the same configuration."""
    yield from defaults(config)
    yield yaml_group("run_dir", config.logging.run_dir)
    for name, value in {**config.megatron.model_args, **config.megatron.overrides}.items():
        yield yaml_group(name, value)
    prefix = f"--{config.engine.rollout_backend}-"
    for group in split_argv(config.engine.backend_argv):
        yield FlagGroup(prefix + group.typed[2:], f"{prefix[2:-1]}_{group.name}", group.values)


def as_shell(groups: Sequence[FlagGroup]) -> str:
    """Formats the flags as a bash array with one flag per line."""
    lines = ["    " + " ".join(shlex.quote(token) for token in group.tokens) for group in groups]
    return "\n".join([f"{ARRAY}=(", *lines, ")", ""])


def as_yaml(groups: Sequence[FlagGroup]) -> str:
    """Formats the flags as a mapping that `--config` reads. A repeated flag has one list of values."""
    content: dict[str, object] = {}
    for group in groups:
        off = group.name != group.positive and not group.values
        key = (group.positive if off else group.name).replace("_", "-")
        values: list[object] = [_plain(text) for text in group.values]
        if key in content and own_flags().get(group.name) is not None and own_flags()[group.name].append:
            before = content[key]
            values = [*(before if isinstance(before, list) else [before]), *values]
        value: object = values or not off
        if len(values) == 1:
            value = values[0]
        content.pop(key, None)  # a repeated key takes the position of its last use
        content[key] = value
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)
    return text


def _plain(text: str) -> str | int | float:
    """Returns the value that YAML reads from `text`, if YAML writes the same text for it. Otherwise returns the
    text."""
    try:
        value = yaml.load(text, Loader=YamlLoader)
    except YAML_ERRORS:
        return text
    same = isinstance(value, int | float) and not isinstance(value, bool) and str(value) == text
    return value if same else text
