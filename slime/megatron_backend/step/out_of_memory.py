"""The trainer's error when its device is out of memory: the phase, the memory on the card by process, and the flags
that lower it, with the bytes that the plan computes for each flag."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slime.config import Config
from slime.memory.card_text import card_lines
from slime.memory.cards import Cards
from slime.memory.processes import find_roles
from slime.plan.advice import savings
from slime.plan.memory_estimate import Estimate
from slime.plan.units import GIB, amount
from slime.tracking.phases import HAND_OVER, LOADING, SAVING, TRAINING
from slime.tracking.timers import Timers

_OF_CARD = re.compile(r"out of memory", re.IGNORECASE)
"""Matches errors of CUDA, and of NCCL, whose error ends with: Cuda failure 2 'out of memory'."""
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40, "EiB": 2**60}
_USUAL = 2 * GIB
"""Bytes that are assumed to be missing if the error does not contain the number, as in NCCL's errors."""
_DOING = {"loading": LOADING, "saving": SAVING, "publishing": HAND_OVER}


@contextmanager
def explained(doing: str, config: Config, estimate: Estimate, timers: Timers) -> Iterator[None]:
    """Replaces an error of a full device in the block, from PyTorch, CUDA or NCCL, by an error that names the phase,
    the memory on the card, and the flags that lower it."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not _OF_CARD.search(str(error)):
            raise
        peaks = {k: v for k, v in timers.flush().items() if k.endswith("_peak_gib")}
        raise torch.OutOfMemoryError(_text(doing, config, estimate, peaks, str(error))) from error


def _text(doing: str, config: Config, estimate: Estimate, peaks: dict[str, float], message: str) -> str:
    by_phase = sorted(
        ((name.removeprefix("perf/").removesuffix("_peak_gib"), value) for name, value in peaks.items()),
        key=lambda pair: -pair[1],
    )
    measured = ", ".join(f"{name} {value:.2f}" for name, value in by_phase) or "none measured on this device"
    phase = _DOING.get(doing.partition(" ")[0], TRAINING)
    found = savings(config, estimate.shape.hf, phase, missing_bytes(message))
    flags = [f"{one.change.flag} (now {one.change.now}) gives {amount(one.saved_bytes)}" for one in found]
    lines = [
        f"out of device memory while {doing}: {message}",
        *_on_card(config),
        f"this rank keeps, by its shapes: {', '.join(_accounts(estimate)) or 'nothing'}",
        f"peaks so far, GiB: {measured}; the estimate of a step was {estimate.peak / GIB:.2f}",
        "what lowers it: " + ("; ".join(flags) or "no single flag; use more or larger GPUs"),
    ]
    return "\n".join(lines)


def missing_bytes(message: str) -> float:
    """Returns the bytes that an error could not allocate, at least _USUAL."""
    tried = re.search(r"allocate ([\d.]+) ([KMGTE]?i?B)", message)
    asked = float(tried[1]) * _UNITS.get(tried[2], 1) if tried else 0.0
    return max(_USUAL, min(asked, 1024 * GIB))


def _on_card(config: Config) -> Iterator[str]:
    """Yields lines about this rank's device: the driver's view by process, and this process's own view."""
    if not torch.cuda.is_available():
        return
    yield from card_lines(
        Cards().read(processes=True), find_roles(Path(config.logging.run_dir) / "logs", -1, [os.getpid()])
    )
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    yield (
        f"this rank has {amount(allocated)} in tensors and {amount(reserved - allocated)} in gaps and cached blocks; "
        "the rest of its part is the CUDA context, libraries and NCCL's communicators"
    )


def _accounts(estimate: Estimate) -> list[str]:
    parts = {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer"}
    found = [(name, estimate.sum_part(part)) for name, part in parts.items()]
    other = sum(item.bytes for item in estimate.kept if item.part is None)
    step = max((item.bytes for item in estimate.work), default=0.0)
    found += [
        ("buckets of an update", other),
        ("and a step adds (activations, head, gradients in flight)", step),
    ]
    return [f"{name} {amount(size)}" for name, size in found if size]
