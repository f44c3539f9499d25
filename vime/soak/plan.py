"""Chooses the faults of a soak and their steps. The same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

RECOVERY_STEPS = 3
"""Number of last steps, in addition to --max-staleness, without a new fault. The recovery from the last fault ends in
them."""
FIRST_STEP = 1


@dataclass(frozen=True)
class Planned:
    """One fault of a plan: it is caused after `step` steps of the soak."""

    step: int
    kind: str


def choose_faults(
    kinds: Sequence[str], *, steps: int, every: int, staleness: int, seed: int
) -> list[Planned]:
    """Returns one fault in each `every` steps, at a random step, ordered by step. Each kind occurs equally often, in
    random order."""
    chance = random.Random(seed)
    last = last_step(steps, staleness)
    count = steps // every
    order: list[str] = []
    while len(order) < count:
        order += chance.sample(list(kinds), len(kinds))
    at = [min(max(number * every + chance.randrange(every), FIRST_STEP), last) for number in range(count)]
    return [Planned(step, kind) for step, kind in zip(sorted(at), order[:count], strict=True)]


def last_step(steps: int, staleness: int) -> int:
    """Returns the last step of a soak after which a fault may be caused."""
    return steps - RECOVERY_STEPS - staleness
