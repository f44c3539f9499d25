"""The memory that a run measured, from the events of the kind `memory` in its journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slime.tracking.journal import Event, read_events
from slime.tracking.phases import PHASES


@dataclass
class Measured:
    """The largest values in a phase, in GiB."""

    cards: dict[int, float] = field(default_factory=dict)
    owners: dict[int, dict[str, float]] = field(default_factory=dict)
    """Card -> role of a process -> its part of the card, at the time of the card's largest use."""
    card_total: float | None = None
    """Size of the smallest card."""
    host: float = 0.0
    host_total: float | None = None
    before: float | None = None
    """Memory of the host in use when the run began."""
    shared_memory: float = 0.0
    processes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Role -> anonymous_gib, shared_gib, files_gib, and pss_gib if it was read."""

    def add(self, event: Event) -> None:
        for card in event["cards"]:
            index, used = int(card["card"]), float(card["used_gib"])
            if used >= self.cards.get(index, 0.0):
                self.cards[index], self.owners[index] = used, dict(card["by_gib"])
            total = float(card["total_gib"])
            self.card_total = total if self.card_total is None else min(total, self.card_total)
        host = event["host"]
        self.shared_memory = max(self.shared_memory, float(host["shared_memory_gib"]))
        if "used_gib" in host:
            self.host, self.host_total = max(self.host, float(host["used_gib"])), float(host["total_gib"])
        self.before = host.get("before_gib", self.before)
        for role, sizes in event["processes"].items():
            own = self.processes.setdefault(role, {})
            own.update({name: max(float(value), own.get(name, 0.0)) for name, value in sizes.items()})

    @property
    def card(self) -> float | None:
        """Returns the use of the fullest card."""
        return max(self.cards.values(), default=None)

    def fullest(self) -> dict[str, float]:
        """Returns role -> its part of the fullest card; empty if no card was read."""
        return self.owners[max(self.cards, key=self.cards.__getitem__)] if self.cards else {}


def measured(events: Iterable[Event]) -> dict[str, Measured]:
    """Returns phase -> measured values, in the order of a run."""
    found: dict[str, Measured] = {}
    for event in events:
        try:
            found.setdefault(str(event["phase"]), Measured()).add(event)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # a line that another program has written
    return {phase: found[phase] for phase in PHASES if phase in found}


def read_measured(run_dir: Path) -> dict[str, Measured]:
    """Returns the measured values of a run. Raises ValueError for a directory without a journal. Empty for a run of a
    version that measured nothing."""
    return measured(read_events(run_dir, kinds=("memory",)))
