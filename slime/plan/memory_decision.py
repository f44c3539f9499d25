"""Decides, from the memory of a trainer rank, which parts of its state leave the device between training steps (if
--offload-train is not given). It also decides whether a GPU of a given size is large enough.

The rollout backend decides the memory of engines (`EngineFacts`). This file has only the numbers that the trainer's
decision needs. It imports neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from slime.config import Config
from slime.config.sections.cluster import PARTS
from slime.plan.card_phases import (
    BESIDES_TRAINER,
    besides_generating,
    card_moments,
    engine_weights,
    hand_over,
    list_engine_moments,
    registered,
    started_engines,
    training,
)
from slime.plan.memory_estimate import Estimate
from slime.plan.units import GIB, amount

TOO_SMALL = "does not fit"
"""First words of a verdict if the GPU is too small for the trainer or the engine. `vime plan` then ends with status
1."""


def gpu(device_bytes: float) -> str:
    """Converts a size to text: 80 GiB -> "a GPU of 80 GiB"."""
    return f"a GPU of {device_bytes / GIB:.4g} GiB"


@dataclass(frozen=True)
class MemoryDecision:
    """The parts of the trainer's state that leave the device between training steps, and lines with reasons and
    sizes."""

    leaving: tuple[str, ...]
    lines: tuple[str, ...]


def choices(e: Estimate, allowed: Collection[str]) -> list[tuple[str, ...]]:
    """Returns sets of parts that may leave. Each set moves the fewest bytes for the memory that it frees.

    Gradients leave first. They move no bytes, because they are not needed between two training steps.
    """
    parts = [part for part in PARTS if part in allowed]
    sets = [s for n in range(len(parts) + 1) for s in itertools.combinations(parts, n)]
    sets = [s for s in sets if not s or "gradients" in s or "gradients" not in parts]
    sets.sort(key=lambda s: (e.sum_moved(s), -e.left(s)))
    best: list[tuple[str, ...]] = []
    for chosen in sets:
        if not best or e.left(chosen) < e.left(best[-1]):
            best.append(chosen)
    return best


def decide_residence(c: Config, e: Estimate, device_bytes: float | None) -> MemoryDecision:
    """Decides which parts leave. `device_bytes` is the memory of the GPU. If it is None (unknown), the result is no
    decision.

    While engines generate: remaining state + buckets + the engines' memory + `besides_generating` <= memory of the GPU.
    The result is the set that fulfils this and moves the fewest bytes. --offload-train offloads all of
    --offload-train-parts for every size of memory, and --no-offload-train offloads none.
    """
    if c.cluster.device != "cuda":
        device_bytes = None
    allowed = c.cluster.offload_train_parts or PARTS
    leaving: tuple[str, ...] = ()
    if not c.cluster.colocate:
        why = None
    elif c.cluster.offload_train is False or registered(c):
        why = "--no-offload-train" if c.cluster.offload_train is False else "--nccl-ub"
    elif c.cluster.offload_train:
        leaving, why = tuple(part for part in PARTS if part in allowed), "--offload-train"
    elif c.cluster.device != "cuda" or not c.num_engines:
        why = None
    elif device_bytes is None:
        return MemoryDecision((), tuple(_by_size(c, e, allowed)))
    else:
        leaving, why = _least(c, e, allowed, device_bytes), "to save memory"
    notes = [] if why is None or (device_bytes is None and not leaving) else [_leaves(e, leaving, why)]
    return MemoryDecision(leaving, (*notes, *_fits(c, e, leaving, device_bytes)))


def _least(c: Config, e: Estimate, allowed: Collection[str], device_bytes: float) -> tuple[str, ...]:
    """Returns the first choice that leaves room for the engine, or the last choice if none does."""
    sets = choices(e, allowed)
    for leaving in sets:
        moments = [*list_engine_moments(c, e, leaving, device_bytes), hand_over(c, e, leaving)]
        if all(moment.bytes <= device_bytes for moment in moments):
            return leaving
    return sets[-1]


def _leaves(e: Estimate, leaving: Collection[str], why: str) -> str:
    if leaving:
        moved = amount(e.sum_moved(leaving))
        what = f"{', '.join(leaving)} leave the device, {moved} to the host and back a step"
    else:
        what = "the trainer's state stays on the device"
    return f"between trainings {what} ({why})"


def _fits(c: Config, e: Estimate, leaving: Collection[str], device_bytes: float | None) -> Iterator[str]:
    """Yields one line per moment, and the verdict. Yields nothing if the size of the GPU is unknown."""
    if device_bytes is None:
        return
    moments = card_moments(c, e, leaving, device_bytes)
    for moment in moments:
        yield f"{moment.when} {amount(moment.bytes)} of {amount(device_bytes)}: {moment.made_of}"
    short = [
        f"{amount(moment.bytes - device_bytes)} too much {moment.when}"
        for moment in moments
        if moment.bytes > device_bytes
    ]
    yield f"{TOO_SMALL} {gpu(device_bytes)}: {'; '.join(short)}" if short else f"fits {gpu(device_bytes)}"


def _by_size(c: Config, e: Estimate, allowed: Collection[str]) -> Iterator[str]:
    """Yields the decision for each size of GPU: `list_engine_moments` <= memory, solved for the memory."""
    facts, several = c.engine.engine_facts, c.cluster.rollout_engines_per_gpu
    free, cache = 1 - facts.memory_share / several, facts.cache_bytes
    yield "what leaves the device while engines generate is decided when its memory is known, here it is not:"
    if free <= 0:
        return
    besides = besides_generating(c)
    for leaving in choices(e, allowed):
        left = e.left(leaving)
        if cache:
            taken = engine_weights(c, e.shape).bytes + cache
            others = started_engines(c, taken)
            least = max(left + several * taken + besides, (left + BESIDES_TRAINER + others) / free)
        else:
            least = (left + besides) / free
        yield f"  from {amount(least)} on: {', '.join(leaving) or 'nothing'}"
    yield f"  and training needs {amount(training(c, e, allowed).bytes)}"
