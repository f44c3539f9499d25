"""Formats the parts of a plan about memory as lines: a trainer rank, an engine, a host, and changes that would make
them fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.models.decoder import Hf
from slime.plan.advice import advice_lines
from slime.plan.fit import DOING, Also, Fit, MachineSizes, Need, fit, shortage
from slime.plan.host_phases import USABLE
from slime.plan.memory_decision import TOO_SMALL, decide_residence
from slime.plan.memory_estimate import Item, estimate
from slime.plan.model_shape import Shape
from slime.plan.units import GIB, amount
from slime.roles.groups import build_groups
from slime.tracking.phases import PHASES
from vime.backends import served_engines
from vime.memory.sizes import machine_sizes
from vime.pool.served import spelled_for
from vime.vllm.memory import card_need, engine_memory, engine_need, engine_verdict, scored_logits


def memory_lines(items: Sequence[Item]) -> Iterator[str]:
    """Yields aligned lines of an estimate."""
    for item in items:
        yield f"{item.name:<20} {amount(item.bytes):>11}   {item.arithmetic}"


def trainer_memory(c: Config, hf: Hf, gpu_bytes: float | None) -> Iterator[str]:
    """Yields the lines of a trainer rank: the memory that it keeps, the memory that a step adds, and their sum at the
    peak.

    Also yields the parts that are offloaded for the engines, and, if the GPU's size is known, whether the GPU is large
    enough.
    """
    e = estimate(c, hf)
    yield from memory_lines(e.kept)
    yield "and one at a time, in a step:"
    yield from memory_lines(e.work)
    yield f"{'peak':<20} {amount(e.peak):>11}   reported against as perf/memory/estimate_gib"
    if e.host:
        yield "on the host:"
        yield from memory_lines(e.host)
    yield from decide_residence(c, e, gpu_bytes).lines


def describe_engine_memory(
    c: Config, hf: Hf, gpu_bytes: float | None, *, scores: bool = False
) -> Iterator[str]:
    """Yields weights and KV cache, and, if the GPU's size is known, whether the GPU is large enough. With `scores`,
    also yields the logits of given tokens."""
    yield from memory_lines(engine_memory(c, Shape.of(hf)))
    if scores and c.cluster.device == "cuda" and c.engine.rollout_backend == "vllm":
        yield from memory_lines([scored_logits(c, Shape.of(hf))])
    if gpu_bytes is not None:
        yield engine_verdict(c, hf, gpu_bytes)


def frozen_models(c: Config, gpu_bytes: float | None) -> dict[str, list[str]]:
    """Returns title -> lines: each frozen model's engine memory, and the flags that are given for the model."""
    parts: dict[str, list[str]] = {}
    for engines in served_engines(c):
        own = engines.settings
        if engines.model.frozen:
            try:
                with spelled_for(engines.model):
                    hf = read_hf_config(own.rollout.hf_checkpoint)
                    found = describe_engine_memory(own, hf, gpu_bytes, scores=True)
                    lines = [engines.spelled(line) for line in found]
            except ValueError as error:  # a family that only the engine supports
                lines = [f"not estimated: {error}"]
            title = f"Memory of an engine of {engines.model.name}, per GPU"
            parts[title] = lines
    return parts


def host_lines(found: Fit, machine: MachineSizes) -> Iterator[str]:
    """Yields the memory of a host's processes, and the verdict, if the host's size is known."""
    if found.host is None:
        return
    phase = found.host.worst
    for item in found.host.items:
        if phase in item.phases:
            yield f"{item.name:<28} {amount(item.bytes):>11}   {item.arithmetic}"
    most = found.host.sum_phase(phase)
    yield f"{'together':<28} {amount(most):>11}   while {DOING[phase]}, without page cache"
    if machine.host is None:
        return
    where = f"a host of {machine.host / GIB:.4g} GiB, of which a plan fills {USABLE:.0%}"
    if (over := most - USABLE * machine.host) > 0:
        yield f"{TOO_SMALL} {where}: {amount(over)} too much while {DOING[phase]}"
    else:
        yield f"fits {where}"


def phase_lines(found: Fit) -> Iterator[str]:
    """Yields a table: each phase, a card per group of trainer ranks, and the host."""
    if found.host is None:
        return
    names = [f"card of a {name} rank" for name in found.cards]
    yield f"{'':<14}" + "".join(f"{name:>26}" for name in names) + f"{'host':>14}"
    for phase in PHASES:
        cells = [amount(card[phase]) if phase in card else "-" for card in found.cards.values()]
        host = f"{amount(found.host.sum_phase(phase)):>14}"
        yield f"{phase:<14}" + "".join(f"{cell:>26}" for cell in cells) + host


def engine_needs(hf: Hf, machine: MachineSizes) -> Also:
    """Returns the needs of the policy's engine in its share, for `slime.plan.fit`."""

    def needs(c: Config) -> Iterable[Need]:
        if machine.device is None or not c.num_engines or c.rollout.rollout_external_engine_addrs:
            return []
        return [engine_need(c, hf, machine.device), *card_need(c, hf, machine.device)]

    return needs


def whole_fit(c: Config, hf: Hf, machine: MachineSizes) -> Fit:
    """Returns the needs of trainer, engines and host."""
    return fit(c, hf, machine, engine_needs(hf, machine))


def remedies(c: Config, hf: Hf, machine: MachineSizes) -> list[str]:
    """Returns changes that would make a run fit. The list is empty if it fits."""
    return advice_lines(c, hf, machine, engine_needs(hf, machine))


def require_fit(c: Config, hf: Hf, machine: MachineSizes) -> None:
    """Raises ValueError for a run that would certainly run out of memory, even without fragmentation in the
    allocator."""
    found = whole_fit(c, hf, machine)
    certain = [need for need in found.needs if need.least > need.limit]
    if certain:
        worst = max(certain, key=lambda need: need.least - need.limit)
        flags = "; ".join(remedies(c, hf, machine)) or "no flag alone helps"
        raise ValueError(
            f"the run must fit this machine, got {shortage(worst)}; change flags or use larger GPUs and hosts: {flags}"
        )


def memory_in_short(c: Config, machine: MachineSizes | None = None) -> Iterator[str]:
    """Yields the estimates in one line, then the decisions from them, for `machine` or this machine."""
    machine = machine or machine_sizes(c)
    hf, gpu_bytes = read_hf_config(c.rollout.hf_checkpoint), machine.device
    estimates, decisions = [], list[str]()
    for group in () if c.debug.debug_rollout_only else build_groups(c):
        e = estimate(group.config, hf)
        estimates.append(f"a {group.name} rank {amount(e.peak)} at its peak")
        decisions += decide_residence(group.config, e, gpu_bytes).lines
    if c.num_engines:
        items = engine_memory(c, Shape.of(hf))
        estimates.append(
            f"an engine, per GPU, {', '.join(f'{item.name} {amount(item.bytes)}' for item in items)}"
        )
        if gpu_bytes is not None:
            decisions.append(f"an engine {engine_verdict(c, hf, gpu_bytes)}")
    yield "; ".join(estimates)
    yield from decisions
