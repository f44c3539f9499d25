"""Benchmark files of the examples beside the records there are: which have none, which have another switch today."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vime.bench.record import Record
from vime.bench.settings import read_settings

IN_WORDS = {"e2e": "full steps of", "module": "a trainer alone (`vime bench module`) on"}
"""Tiers that a benchmark of the examples has; how its record is called where there is none."""


def without_record(records: Sequence[Record], examples: Path) -> list[str]:
    """A line a tier: the files of `examples` that no record is of as they stand, with the presets that one is of, and
    by which switch where that is not the file's; the file for a CPU proves the harness alone."""
    texts = []
    for tier, what in IN_WORDS.items():
        names = []
        for path in sorted(examples.glob("*.yaml")):
            name, switch = path.stem, _switch_of(path)
            own = [record for record in records if (record.tier, record.name) == (tier, name)]
            if name.endswith("-cpu") or any((r.preset, r.switch["field"]) == (None, switch) for r in own):
                continue
            alike = {record.preset or "" for record in own if record.switch["field"] == switch}
            others = {_otherwise(record, switch) for record in own if record.preset not in alike}
            but = sorted(alike | others)
            names.append(name + (f" (but for {', '.join(but)})" if but else ""))
        if names:
            texts.append(f"{what} {', '.join(names)}")
    return texts


def of_another_switch(record: Record, examples: Path) -> list[str]:
    """What to know of a command whose file has changed its switch since."""
    path, was = examples / f"{record.name}.yaml", record.switch["field"]
    if not path.is_file() or (switch := _switch_of(path)) == was:
        return []
    return [
        f"The file switched `{was}` at that commit and switches `{switch}` today: to repeat this, check out the commit."
    ]


def _otherwise(record: Record, switch: str) -> str:
    return f"{record.preset or 'all of it'} by `{record.switch['field']}`, not `{switch}`"


def _switch_of(path: Path) -> str:
    return read_settings(path).switch.field
