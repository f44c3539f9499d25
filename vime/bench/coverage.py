"""Benchmark files of the examples beside the records there are: which have none, which have another switch today."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime.bench.record import SIDES, Record
from vime.bench.settings import presets_of, read_settings

IN_WORDS = {"e2e": "full steps of", "module": "a trainer alone (`vime bench module`) on"}
"""Tiers that a benchmark of the examples has; how its record is called where there is none."""


def without_record(records: Sequence[Record], examples: Path) -> list[str]:
    """A line a tier: the files of `examples` that no record is of with the switch that they have, with the presets that
    one is of, and by which switch where that is another today; the file for a CPU proves the harness alone."""
    texts = []
    for tier, what in IN_WORDS.items():
        names = []
        for path in sorted(examples.glob("*.yaml")):
            own = [record for record in records if (record.tier, record.name) == (tier, path.stem)]
            found = [(record.preset, _otherwise(record, path)) for record in own]
            if path.stem.endswith("-cpu") or (None, None) in found:
                continue
            alike = {str(preset) for preset, moved in found if moved is None}
            others = {
                f"{preset or 'all of it'} {moved}" for preset, moved in found if moved and preset not in alike
            }
            but = sorted(alike | others)
            names.append(path.stem + (f" (but for {', '.join(but)})" if but else ""))
        if names:
            texts.append(f"{what} {', '.join(names)}")
    return texts


def of_another_switch(record: Record, examples: Path) -> list[str]:
    """What to know of a command whose file has changed its switch since."""
    path = examples / f"{record.name}.yaml"
    moved = _otherwise(record, path) if path.is_file() else None
    return [] if moved is None else [f"Measured {moved}: to repeat this, check out the commit."]


def _otherwise(record: Record, path: Path) -> str | None:
    """By which switch a record is that is not the one its file has today; None where it is."""
    if record.preset is not None and record.preset not in presets_of(path):
        return f"by preset {record.preset}, which the file does not have today"
    was, today = record.switch, read_settings(path, record.preset).switch
    if was["field"] != today.field:
        return f"by `{was['field']}`, not by `{today.field}` as the file has it today"
    if any(_values(was[side]) != _values(getattr(today, side)) for side in SIDES):
        return f"by other values of `{today.field}` than the file has today"
    return None


def _values(value: Any) -> set[str]:
    """Of a switch: a run resolves to a list what a file may spell with commas."""
    return set(map(str, value)) if isinstance(value, list) else set(str(value).split(","))
