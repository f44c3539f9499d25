"""Finds other trainers' settings that this project spells differently, for the error of an unknown flag and for two
pages. The rows are in peer_trl.py and peer_verl.py."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from slime.config.near_names import nearest
from slime.config.peer_rows import OTHERS, TRL, VALUES, VERL, Row
from slime.config.peer_trl import OTHERS_ROWS, TRL_ROWS
from slime.config.peer_verl import VERL_ROWS, VERL_SECTIONS
from slime.records.errors import FlagError, UnknownFlag

PAGES = {TRL: "docs/from-trl.md", VERL: "docs/from-verl.md"}
"""Documentation page by program."""
_OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(VERL_SECTIONS)})(?:\.[A-Za-z_]\w*)+)=(.*)", re.DOTALL)
_FIELD = re.compile(r"(?: [a-z]+)? \S*\{\}\S*")
_SHOWN = 70
"""Maximum number of characters of a setting in a table; longer settings are cut."""


@dataclass(frozen=True)
class PeerName:
    """One setting of another program."""

    program: str
    name: str
    flags: str
    """Flags of this project as typed, with {} for the setting's value. The text is empty if no flag is needed."""
    note: str = ""
    """The difference to the other program. Without a flag, the reason."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Value -> its flags, if the value decides. The text is empty if the value needs no flag."""

    @property
    def shown(self) -> str:
        """Returns the flags for the page, without a value."""
        return _FIELD.sub("", self.flags)

    def ours(self, value: str = "") -> str:
        """Returns the flags of this project for the setting with this value. The text is empty if it needs no flag."""
        items = _items(value) if value else [_TRUE]
        words = [self._word(item) for item in items]
        if not self.flags or (words == ["null"] and "null" not in self.values):
            return ""
        if any(word in self.values for word in words):
            found = [self.values.get(word, self.shown) for word in words]
            return " ".join(dict.fromkeys(flags for flags in found if flags))
        return self.flags.replace("{}", " ".join(map(shlex.quote, items))) if value else self.shown

    def _word(self, item: str) -> str:
        """Returns a value as `values` spells it."""
        word = item.lower()
        return word if word in self.values else _SAME.get(word, word)

    def answer(self, value: str = "") -> str:
        """Returns the remedy for the setting, as the end of an error message."""
        by = f" of {self.program}" if self.program in PAGES else ""
        if not self.flags:
            return f"leave {self.name}{by} out: {self.note}"
        if not (flags := self.ours(value)):
            return f"leave {self.name}{value and f'={value}'}{by} out: {_DEFAULT}"
        return f"for {self.name}{by}, give {flags}{self.note and f' ({self.note})'}"

    def line(self, value: str) -> str:
        """Returns the remedy for a table of settings, without the name."""
        if not (flags := self.ours(value)):
            return f"leave it out ({self.note if not self.flags else _DEFAULT})"
        return f"{flags}{self.note and f'  ({self.note})'}"


_DEFAULT = "vime needs no flag for that"
_TRUE = "true"
_SAME = {
    "1": _TRUE,
    "yes": _TRUE,
    "on": _TRUE,
    "0": "false",
    "no": "false",
    "off": "false",
    "none": "null",
    "": "null",
}


def _items(value: str) -> list[str]:
    """Returns the words of a value. A list of Hydra or YAML has several."""
    text = value.strip().strip("'\"")
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    return [word for part in text[1:-1].split(",") if (word := part.strip().strip("'\""))]


def build_table(program: str, rows: Iterable[Row]) -> dict[str, PeerName]:
    """Returns name -> its entry."""
    return {row[0]: PeerName(program, *row) for row in rows}


PEER_NAMES: dict[str, PeerName] = {
    **build_table(TRL, TRL_ROWS),
    **build_table(VERL, VERL_ROWS),
    **build_table(OTHERS, OTHERS_ROWS),
}
"""Settings that no backend owns. A backend adds the settings of its engine."""
NONE: Mapping[str, PeerName] = MappingProxyType({})


def instead(flag: str, value: object, known: Iterable[object]) -> str:
    """Returns the end of an error message about a value that a flag does not have.

    It contains the flags for another trainer's word, or the known value closest to the given one.
    """
    word = str(value).lower()
    if (answer := VALUES.get(flag, {}).get(word)) is not None:
        return f"; {answer}"
    return nearest(str(value), map(str, known), prefix="")


def parse_override(token: str) -> tuple[str, str] | None:
    """Returns name and value of a token that is a setting of verl in Hydra's spelling, such as `algorithm.gamma=1`, or
    None."""
    found = _OVERRIDE.fullmatch(token)
    return None if found is None else (found[1], found[2])


@dataclass(frozen=True)
class PeerSetting:
    """A setting of another program as the user gave it."""

    typed: str
    name: str
    value: str
    """Value of the setting. It is empty for a switch without a value."""
    origin: str = ""
    entry: PeerName | None = None
    """Entry of the setting. It is None for a setting of verl that no table has."""

    def problem(self) -> UnknownFlag:
        """Returns the error of this setting."""
        if self.entry is None:
            answer = f"it is spelled as a setting of verl, and no flag is known for it: {self._search()}"
        else:
            answer = self.entry.answer(self.value)
        prefix = f"{self.origin}: " if self.origin else ""
        return UnknownFlag(self.typed, "a known flag", advice=f"; {answer}", prefix=prefix)

    def line(self, width: int) -> str:
        """Returns its line in a table of settings."""
        found = self._search() if self.entry is None else self.entry.line(self.value)
        return f"{self.yours():<{width}} -> {found}"

    def yours(self) -> str:
        """Returns the setting as the user gave it, shortened."""
        text = f"{self.name}={self.value}" if self.value else self.typed
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
        return f"{self.origin}: {text}" if self.origin else text

    def _search(self) -> str:
        word = self.name.rpartition(".")[2]
        return f"leave it out, or look for a flag with `vime flags {word}`"


def peer_settings(
    typed: str, name: str, values: Sequence[str], engines: Mapping[str, PeerName] = NONE, origin: str = ""
) -> list[PeerSetting]:
    """Returns other programs' settings in one flag. The list is empty if `name` belongs to this project. `no_` before a
    name means the value false.

    `engines` has the settings that the backend owns. A section of verl in a YAML file has its settings as a JSON object
    in `values`.
    """
    name, known = name.lstrip("+"), {**PEER_NAMES, **engines}
    positive = name.removeprefix("no_")
    value = f"[{', '.join(values)}]" if len(values) > 1 else "".join(values)
    if name in known:
        return [PeerSetting(typed, name, value, origin, known[name])]
    if positive in known:
        return [PeerSetting(typed, positive, "false", origin, known[positive])]
    if name in VERL_SECTIONS:
        found = [
            PeerSetting(each, each, text, origin, known.get(each)) for each, text in _inner(name, values)
        ]
        return found or [PeerSetting(typed, name, value, origin)]
    if name.partition(".")[0] in VERL_SECTIONS:
        return [PeerSetting(typed, name, value, origin)]
    return []


def check_peers(found: Sequence[PeerSetting]) -> None:
    """Raises ValueError for other programs' settings: a sentence for one setting, a table for several."""
    if len(found) == 1:
        raise found[0].problem()
    if found:
        programs = {each.entry.program if each.entry else VERL for each in found}
        pages = [PAGES[program] for program in PAGES if program in programs]
        width = max(len(each.yours()) for each in found)
        lines = "".join(f"\n       {each.line(width)}" for each in found)
        raise FlagError(
            f"{len(found)} settings of other trainers",
            "be flags of vime",
            "the left column",
            f"give the right one{' (' + ', '.join(pages) + ')' if pages else ''}:{lines}",
        )


def _inner(section: str, values: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the dotted name and value of every setting in a section."""
    for text in values:
        try:
            todo = [(section, json.loads(text))]
        except ValueError:
            continue
        while todo:
            name, value = todo.pop(0)
            if isinstance(value, dict):
                todo += [(f"{name}.{key}", each) for key, each in value.items()]
            else:
                yield name, value if isinstance(value, str) else json.dumps(value)
