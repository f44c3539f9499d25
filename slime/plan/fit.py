"""Whether a whole run fits a machine: what each card and each host needs at every moment, against what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slime.config import Config
from slime.models.decoder import Hf
from slime.plan.card_phases import card_moments, of_phase
from slime.plan.host_phases import SYSTEM, USABLE, HostSum, host_sum
from slime.plan.memory_decision import decide_residence
from slime.plan.memory_estimate import estimate
from slime.plan.units import GIB, amount
from slime.roles.groups import groups_of
from slime.tracking.phases import PHASES


@dataclass(frozen=True)
class MachineSizes:
    """The sizes of the machine that a plan is for, in bytes. None: not known."""

    device: float | None = None
    """Of each GPU."""
    host: float | None = None
    """Of each host, or the limit of the container."""
    system: float = SYSTEM
    """What the host uses without the run."""


@dataclass(frozen=True)
class Need:
    """What one kind of memory must hold at one moment."""

    of: str
    """ "a GPU" or "a host"."""
    when: str
    phase: str
    bytes: float
    limit: float
    least: float
    """Without what the run may do without: gaps of the allocator, the distance that the plan keeps from a kill."""

    @property
    def over(self) -> float:
        """Bytes too much; negative if it fits."""
        return self.bytes - self.limit


@dataclass(frozen=True)
class Fit:
    """The needs of a run."""

    needs: tuple[Need, ...]
    cards: dict[str, dict[str, float]]
    """Group of trainer ranks -> phase -> bytes on a card."""
    host: HostSum | None

    @property
    def worst(self) -> Need | None:
        """The need with the most bytes too much."""
        return max(self.needs, key=lambda need: need.over, default=None)

    @property
    def over(self) -> float:
        """Bytes too much at the worst moment; at most 0 if the run fits."""
        return max((need.over for need in self.needs), default=0.0)

    def short(self) -> list[Need]:
        return [need for need in self.needs if need.over > 0]


Also = Callable[[Config], Iterable[Need]]
"""More needs of a configuration: those of an engine, which its backend knows."""


def fit(c: Config, hf: Hf, machine: MachineSizes, also: Also | None = None) -> Fit:
    """The needs of a run on `machine`, for what is known of its sizes. Empty for a run on CPUs."""
    needs: list[Need] = []
    if c.cluster.device != "cuda":
        return Fit((), {}, None)
    cards, groups = {}, []
    for group in () if c.debug.debug_rollout_only else groups_of(c):
        e = estimate(group.config, hf)
        leaving = decide_residence(group.config, e, machine.device).leaving
        moments = card_moments(group.config, e, leaving, machine.device)
        cards[group.name] = of_phase(moments)
        groups.append((group.config, e, leaving))
        if machine.device is not None:
            needs += [
                Need("a GPU", m.when, m.phase, m.bytes, machine.device, m.bytes - m.gaps) for m in moments
            ]
    host = host_sum(groups, machine.system) if groups else None
    if host is not None and machine.host is not None:
        limit = USABLE * machine.host
        for phase in PHASES:
            size = host.of_phase(phase)
            needs.append(Need("a host", f"while {DOING[phase]}", phase, size, limit, size))
    if also is not None:
        needs += also(c)
    return Fit(tuple(needs), cards, host)


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
"""Phase -> what the run does then."""


def size(need: Need) -> str:
    """The memory that is too small, as "a GPU of 80 GiB"."""
    whole = need.limit / USABLE if need.of == "a host" else need.limit
    return f"{need.of} of {whole / GIB:.4g} GiB"


def shortage(need: Need) -> str:
    """What is missing, in words."""
    where = f", of which a plan fills {USABLE:.0%}" if need.of == "a host" else ""
    return f"{amount(need.bytes)} {need.when}, {amount(need.over)} too much for {size(need)}{where}"
