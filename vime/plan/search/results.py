"""The results of a search."""

from __future__ import annotations

from dataclasses import dataclass

from slime.plan.fit import Fit
from vime.plan.search.step_time import GpuLayout, PredictedStep


@dataclass(frozen=True)
class Found:
    """A layout that fits, with its times and its memory."""

    layout: GpuLayout
    prediction: PredictedStep
    fit: Fit


@dataclass(frozen=True)
class Searched:
    """The result of a search: layouts in the order of their time. `possible` layouts have room for the trainer's state,
    and the memory of `checked` layouts was planned. `short` is the layout that came closest to fitting, if none fits,
    and it misses `missing` bytes."""

    found: list[Found]
    layouts: int
    possible: int
    checked: int
    missing: float
    short: str
