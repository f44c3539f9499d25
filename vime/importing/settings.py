"""The settings of another trainer, and the lines of vime's file that they become."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import yaml

from slime.config.config_file import FlagGroup, split_argv
from slime.config.peer_names import PEER_NAMES, PeerName
from slime.rules.flags import own_flags
from vime.commands.config import as_yaml
from vime.vllm.peer_names import VLLM_PEER_NAMES

PEERS: Mapping[str, PeerName] = {**PEER_NAMES, **VLLM_PEER_NAMES}


@dataclass(frozen=True)
class Setting:
    """A setting that the user gave, or a default of the other trainer."""

    name: str
    value: object
    origin: str
    """File and line, or the trainer whose default it is."""
    is_default: bool = False

    @property
    def shown(self) -> str:
        text = f"{self.name}={as_text(self.value)}"
        return text if len(text) <= 100 else f"{text[:97]}..."


@dataclass(frozen=True)
class Entry:
    """A part of the file: flags of vime, and the comment before them."""

    comment: str
    flags: Mapping[str, object] = field(default_factory=dict)
    absent: str = ""
    """The reason if the setting has no flag."""
    setting: Setting | None = None


@dataclass
class Imported:
    """The result of an import: the file's entries, and other files by name."""

    program: str
    source: str
    entries: list[Entry] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Name of a further file -> its text."""
    first: list[str] = field(default_factory=list)
    """Commands and notes for the user, before the run."""

    def add(self, comment: str, **flags: object) -> None:
        self.entries.append(Entry(comment, flags))

    def text(self) -> str:
        """Returns the YAML text. The first entry of a flag counts, and later ones become comments."""
        lines = [f"# Flags of `vime train`, from {self.source} ({self.program}), by `vime import`."]
        taken: dict[str, object] = {}
        for entry in self.entries:
            new = {name: value for name, value in entry.flags.items() if name not in taken}
            taken |= new
            lines += ["", *(f"# {line}" for line in entry.comment.splitlines())]
            for name, value in new.items():
                lines.append(_yaml_line(name, value))
        return "\n".join(lines) + "\n"


def as_text(value: object) -> str:
    """Returns a value as the tables of settings spell it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_text, value))}]"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _yaml_line(name: str, value: object) -> str:
    text: str = yaml.safe_dump({name.replace("_", "-"): value}, allow_unicode=True, width=1000)
    return text.rstrip("\n")


def converted(program: str, settings: Iterable[Setting]) -> Iterator[Entry]:
    """Yields an entry for each setting by the tables of names. A default of the other trainer without an effect here,
    or with the same default here, has no entry."""
    for setting in settings:
        if setting.value is None:
            continue
        entry = _entry(program, setting)
        if not setting.is_default or _differs(entry):
            yield entry


def _entry(program: str, setting: Setting) -> Entry:
    head = f"{setting.shown} ({setting.origin})"
    name, text = setting.name, as_text(setting.value)
    peer = PEERS.get(name)
    if peer is None:
        return _match_same_name(program, setting, head)
    if not peer.flags:
        return Entry(f"{head}: no flag: {peer.note}", absent=peer.note, setting=setting)
    flags = peer.ours(text)
    if not flags:
        return Entry(f"{head}: vime needs no flag for this value", setting=setting)
    groups = split_argv(shlex.split(flags))
    by_hand = [group.typed for group in groups if not group.values and not _is_switch(group)]
    note = f": {peer.note}" if peer.note else ": same meaning"
    if by_hand:
        reason = f"give {', '.join(by_hand)} yourself{note if peer.note else ''}"
        return Entry(f"{head}: {reason}", absent=reason, setting=setting)
    found = {flag: _typed(flag, value) for flag, value in yaml.safe_load(as_yaml(groups)).items()}
    return Entry(f"{head}{note}{_other_default(found)}", found, setting=setting)


def _match_same_name(program: str, setting: Setting, head: str) -> Entry:
    """Returns the entry of a setting that no table has: a flag of the same name, or a line that names it."""
    if setting.name in own_flags():
        flags = {setting.name.replace("_", "-"): setting.value}
        return Entry(f"{head}: same meaning{_other_default(flags)}", flags, setting=setting)
    word = setting.name.rpartition(".")[2]
    reason = f"no table of vime has this setting of {program}; `vime flags {word}` searches for a flag"
    return Entry(f"{head}: {reason}", absent=reason, setting=setting)


def _typed(flag: str, value: object) -> object:
    """Returns a number for a flag with numbers, because YAML 1.1 reads 1e-06 as a text."""
    spec = own_flags().get(flag.replace("-", "_"))
    return (
        spec.kind(value)
        if spec is not None and spec.kind in (int, float) and isinstance(value, str)
        else value
    )


def _is_switch(group: FlagGroup) -> bool:
    spec = own_flags().get(group.name) or own_flags().get(group.positive)
    return spec is None or spec.kind is bool


def _other_default(flags: Mapping[str, object]) -> str:
    """Returns the end of a comment if vime has another default."""
    others = [
        f"--{name} {as_text(spec.default)}"
        for name in flags
        if (spec := own_flags().get(name.replace("-", "_"))) is not None
        and spec.default not in (None, flags[name])
        and spec.kind is not bool
    ]
    return f" (default of vime: {', '.join(others)})" if others else ""


def _differs(entry: Entry) -> bool:
    """Returns True if a flag of the entry has another value than vime's default."""
    for name, value in entry.flags.items():
        spec = own_flags().get(name.replace("-", "_"))
        if spec is None or spec.default is None or spec.default != value:
            return True
    return False
