"""`vime import`: writes vime's file, and prints what has no counterpart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import yaml

from slime.config.config_file import YAML_ERRORS
from slime.config.peer_rows import TRL, VERL
from slime.config.peer_verl import VERL_SECTIONS
from slime.records.errors import FlagError
from vime.importing.settings import Imported, Setting
from vime.importing.trl import import_script, settings_of_command
from vime.importing.trl_script import read_script
from vime.importing.verl import import_settings, read_settings

USAGE = """usage: vime import [trl|verl] FILE [SETTINGS] [--output FILE.yaml]

Write the flags of vime for a script of TRL (GRPOTrainer), or for a YAML file or a launch script of verl. The file is
read and not run. SETTINGS are those of the other trainer's command line: --learning_rate 1e-6 for TRL, and
data.train_batch_size=64 for verl. Each line of the new file has a comment about its meaning in vime."""


def main(argv: Sequence[str]) -> int:
    """Writes the files. Raises ValueError for a file that is neither of TRL nor of verl, and for an output that
    exists."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    words, out = _without_output(argv)
    program = words.pop(0) if words[:1] in (["trl"], ["verl"]) else None
    if not words or words[0].startswith("-"):
        raise FlagError(
            "FILE",
            "name a script or a configuration",
            words[0] if words else "none",
            "see vime import --help",
        )
    path = Path(words[0])
    if not path.is_file():
        raise FlagError("FILE", "name a file that exists", path, "check the path")
    made = _imported(
        program or _program(path), path, words[1:], target := out or Path(f"{path.stem}-vime.yaml")
    )
    _write(made, target)
    return 0


def _without_output(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    words = list(
        itertools.chain.from_iterable(w.split("=", 1) if w.startswith("--output=") else [w] for w in argv)
    )
    for flag in ("--output", "-o"):
        if flag in words:
            index = words.index(flag)
            if index + 1 == len(words):
                raise FlagError(flag, "be followed by a file", "none", "give FILE.yaml")
            out = Path(words[index + 1])
            if out.suffix not in (".yaml", ".yml"):
                raise FlagError(flag, "name a YAML file", out, "give FILE.yaml")
            return words[:index] + words[index + 2 :], out
    return words, None


def _program(path: Path) -> str:
    """Returns trl or verl, from the content of the file."""
    if path.suffix == ".py":
        return "trl"
    if path.suffix == ".sh":
        return "verl"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except YAML_ERRORS as error:
        raise FlagError(str(path), "be valid YAML", error, "correct the file") from error
    if isinstance(content, dict) and set(VERL_SECTIONS) & content.keys():
        return "verl"
    raise FlagError(
        str(path),
        "be a script of TRL, or a YAML file or a launch script of verl",
        f"a file with {', '.join(map(str, list(content)[:4])) if isinstance(content, dict) else 'no mapping'}",
        "name the program: vime import verl FILE",
    )


def _imported(program: str, path: Path, words: Sequence[str], out: Path) -> Imported:
    if program == "verl":
        return import_settings(path, read_settings(path, words), out)
    settings: list[Setting] = settings_of_command(words)
    for name in [str(one.value) for one in settings if one.name == "config"]:
        settings = [*_yaml_settings(Path(name)), *settings]
    return import_script(read_script(path), settings, out)


def _yaml_settings(path: Path) -> list[Setting]:
    """Returns the settings of a flat YAML file, which TRL's commands read with --config."""
    if not path.is_file():
        raise FlagError("--config of TRL", "name a file that exists", path, "check the path")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Setting(str(name), value, path.name) for name, value in dict(content or {}).items()]


def _write(made: Imported, out: Path) -> None:
    files = {out: made.text(), **{out.with_name(name): text for name, text in made.files.items()}}
    taken = [str(file) for file in files if file.exists()]
    if taken:
        raise FlagError("--output", "name new files", ", ".join(taken), "give another name or remove them")
    out.parent.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    program = TRL if made.program == TRL else VERL
    absent = [one for one in made.entries if one.absent]
    same = sum(bool(one.flags) for one in made.entries)
    print(f"{', '.join(map(str, files))}: {same} entries with flags, {len(absent)} without")
    for one in absent:
        print(f"{program}: {one.comment}")
    for note in made.first:
        print(f"first: {note}")
    print(f"next: vime plan --config {out}")
