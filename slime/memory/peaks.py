"""The largest memory use during one phase of a run, and its record in the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime.memory.cards import CardMemory
from slime.memory.host import HostMemory
from slime.memory.processes import ProcessMemory
from slime.plan.units import GIB


@dataclass(frozen=True)
class MemoryReading:
    """A sample of the memory at one time."""

    cards: list[CardMemory]
    host: HostMemory | None
    shared_memory: int
    """Bytes in files of /dev/shm."""
    processes: Mapping[int, ProcessMemory]
    roles: Mapping[int, str]
    """Role per process id."""
    proportional: Mapping[str, int] = field(default_factory=dict)
    """Role -> bytes, the newest values that were read."""

    def by_role(self) -> dict[str, ProcessMemory]:
        """Returns the memory per role, summed over the role's processes."""
        found: dict[str, ProcessMemory] = {}
        for pid, memory in self.processes.items():
            role = self.roles[pid]
            found[role] = found.get(role, ProcessMemory()) + memory
        return found


@dataclass
class Peaks:
    """The largest values of the samples during one stay in a phase. For a card, its state with processes is kept from
    the time of its largest use."""

    phase: str
    rollout: int | None = None
    samples: int = 0
    cards: dict[int, tuple[CardMemory, dict[str, int]]] = field(default_factory=dict)
    host: HostMemory | None = None
    before: int | None = None
    """Bytes that the host used when the run began."""
    shared_memory: int = 0
    processes: dict[str, ProcessMemory] = field(default_factory=dict)
    proportional: dict[str, int] = field(default_factory=dict)

    def add(self, sample: MemoryReading) -> None:
        self.samples += 1
        for card in sample.cards:
            if card.index not in self.cards or card.used > self.cards[card.index][0].used:
                self.cards[card.index] = card, _owners(card, sample.roles)
        if sample.host is not None and (self.host is None or sample.host.used > self.host.used):
            self.host = sample.host
        self.shared_memory = max(self.shared_memory, sample.shared_memory)
        for role, memory in sample.by_role().items():
            if memory.resident > self.processes.get(role, ProcessMemory()).resident:
                self.processes[role] = memory
        for role, size in sample.proportional.items():
            self.proportional[role] = max(size, self.proportional.get(role, 0))

    def fields(self) -> dict[str, object]:
        """Returns the fields of an event of the kind `memory`, with sizes in GiB."""
        cards = [
            {
                "card": index,
                "used_gib": _gib(card.used),
                "total_gib": _gib(card.total),
                "by_gib": {role: _gib(size) for role, size in owners.items()},
            }
            for index, (card, owners) in sorted(self.cards.items())
        ]
        host: dict[str, object] = {"shared_memory_gib": _gib(self.shared_memory)}
        if self.host is not None:
            host |= {
                "used_gib": _gib(self.host.used),
                "total_gib": _gib(self.host.total),
                "limit": self.host.limit,
                **({} if self.before is None else {"before_gib": _gib(self.before)}),
            }
        processes = {
            role: {
                "anonymous_gib": _gib(memory.anonymous),
                "shared_gib": _gib(memory.shared),
                "files_gib": _gib(memory.files),
                **({"pss_gib": _gib(self.proportional[role])} if role in self.proportional else {}),
            }
            for role, memory in sorted(self.processes.items())
        }
        rollout = {} if self.rollout is None else {"rollout": self.rollout}
        return {
            "phase": self.phase,
            "samples": self.samples,
            "cards": cards,
            "host": host,
            "processes": processes,
            **rollout,
        }


def _owners(card: CardMemory, roles: Mapping[int, str]) -> dict[str, int]:
    """Returns role -> bytes on a card. A process outside the run, or whose id a container hides, keeps its process id
    as the role."""
    found = Counter[str]()
    for pid, size in card.by_process.items():
        found[roles.get(pid, f"pid {pid}")] += size
    return dict(found)


def _gib(size: int) -> float:
    return round(size / GIB, 3)
