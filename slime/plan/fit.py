"""Decides whether a run fits a machine. It compares the memory that each card and host needs with their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slime.config import Config
from slime.models.decoder import Hf
from slime.plan.card_phases import card_moments, compute_peaks
from slime.plan.host_phases import SYSTEM, USABLE, HostSum, host_sum
from slime.plan.memory_decision import decide_residence
from slime.plan.memory_estimate import estimate
from slime.plan.units import GIB, amount
from slime.roles.groups import build_groups
from slime.tracking.phases import PHASES


@dataclass(frozen=True)
class MachineSizes:
    """The sizes of the machine that a plan is for, in bytes. None means unknown."""

    device: float | None = None
    """Bytes per GPU."""
    host: float | None = None
    """Bytes per host, or the limit of the container."""
    system: float = SYSTEM
    """Bytes that the host uses without the run."""


@dataclass(frozen=True)
class Need:
    """The memory that a GPU or a host needs at one moment."""

    of: str
    """"a GPU" or "a host"."""
    when: str
    phase: str
    bytes: float
    limit: float
    least: float
    """Bytes without the parts that the run can do without: gaps of the allocator, the distance that the plan keeps from
    a kill."""

    @property
    def over(self) -> float:
        """Returns the missing bytes; negative if the memory fits."""
        return self.bytes - self.limit


@dataclass(frozen=True)
class Fit:
    """The needs of a run."""

    needs: tuple[Need, ...]
    cards: dict[str, dict[str, float]]
    """Group of trainer ranks -> phase -> bytes on a card."""
    host: HostSum | None
    moved: float = 0.0
    """Bytes that leave a shared GPU for the host between two trainings, of the rank that moves most."""

    @property
    def worst(self) -> Need | None:
        """Returns the need with the most missing bytes."""
        return max(self.needs, key=lambda need: need.over, default=None)

    @property
    def over(self) -> float:
        """Returns the missing bytes at the worst moment; at most 0 if the run fits."""
        return max((need.over for need in self.needs), default=0.0)

    def short(self) -> list[Need]:
        return [need for need in self.needs if need.over > 0]


Also = Callable[[Config], Iterable[Need]]
"""Returns further needs of a configuration: the needs of an engine, from its backend."""


def fit(c: Config, hf: Hf, machine: MachineSizes, also: Also | None = None) -> Fit:
    """Returns the needs of a run on `machine`, for the sizes that are known. Empty for a run on CPUs."""
    needs: list[Need] = []
    if c.cluster.device != "cuda":
        return Fit((), {}, None)
    cards, groups, moved = {}, [], 0.0
    for group in () if c.debug.debug_rollout_only else build_groups(c):
        e = estimate(group.config, hf)
        leaving = decide_residence(group.config, e, machine.device).leaving
        moments = card_moments(group.config, e, leaving, machine.device)
        cards[group.name] = compute_peaks(moments)
        moved = max(moved, e.sum_moved(leaving))
        groups.append((group.config, e, leaving))
        if machine.device is not None:
            needs += [
                Need("a GPU", m.when, m.phase, m.bytes, machine.device, m.bytes - m.gaps) for m in moments
            ]
    host = host_sum(groups, machine.system) if groups else None
    if host is not None and machine.host is not None:
        limit = USABLE * machine.host
        for phase in PHASES:
            size = host.sum_phase(phase)
            needs.append(Need("a host", f"while {DOING[phase]}", phase, size, limit, size))
    if also is not None:
        needs += also(c)
    return Fit(tuple(needs), cards, host, moved)


DOING = dict(
    zip(
        PHASES,
        (
            "it loads",
            "engines get their first weights",
            "engines generate",
            "weights are handed over",
            "it trains",
            "it saves",
        ),
        strict=True,
    )
)
"""Maps each phase to a text about it."""


def size(need: Need) -> str:
    """Returns the memory that is too small, as "a GPU of 80 GiB"."""
    whole = need.limit / USABLE if need.of == "a host" else need.limit
    return f"{need.of} of {whole / GIB:.4g} GiB"


def shortage(need: Need) -> str:
    """Returns a text about the missing memory."""
    where = f", of which a plan fills {USABLE:.0%}" if need.of == "a host" else ""
    return f"{amount(need.bytes)} {need.when}, {amount(need.over)} too much for {size(need)}{where}"
