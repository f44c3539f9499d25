"""Runs micro-batches through the stages of the model with Megatron's schedule, and shares the last stage's results.

    pack -> stage_output -> [next stage] -> ... -> loss -> backward -> ... -> [stage before]

A training pass runs in training mode, and every other pass in evaluation mode: only training draws dropout.

Without pipeline parallelism, the schedule runs one micro-batch after another. With pipeline parallelism, forward and
backward alternate (1F1B, 2104.04473). With virtual stages, each rank has several parts of the model and the schedule is
interleaved (part 2.2 of the same paper). Micro-batches may differ in length, so the stages send their shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rl_kernel.fp8 import keep_rounded
from slime.data.packing import MicroBatch
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import get_parts, stage_output, unwrap
from slime.megatron_backend.parallel import ParallelInfo
from slime.tracking.timers import Timers

T = TypeVar("T")

OnOutput = Callable[[MicroBatch, Tensor], tuple[Tensor, T]]
"""Maps (micro-batch, the last stage's output) to (the loss for the backward, the result to return)."""


def run_stages(
    model: Any,
    info: ParallelInfo,
    batches: Iterable[MicroBatch],
    count: int,
    on_output: OnOutput[T],
    timers: Timers,
) -> list[T]:
    """Runs forward and backward of `count` micro-batches in training mode. Gradients add up in the model's buffers, not
    yet over ranks.

    Returns the results of `on_output` in order on the last stage, and an empty list on other stages. Collective over
    the ranks of the pipeline, and over data-parallel ranks with --overlap-grad-reduce.
    """
    parts: list[Any] = get_parts(model)
    core = unwrap(parts[0]).config  # all parts have the same config
    core.timers = _ScheduleTimers(timers)
    core.no_sync_func = parts[0].no_sync if len(parts) == 1 else [part.no_sync for part in parts]
    _set_mode(parts, training=True)
    return _schedule(model, info, batches, count, on_output, timers, forward_only=False)


def run_forward(
    model: Any,
    info: ParallelInfo,
    batches: Iterable[MicroBatch],
    count: int,
    on_output: Callable[[MicroBatch, Tensor], T],
) -> list[T]:
    """Runs only the forward of `count` micro-batches in evaluation mode, under the caller's torch.no_grad(). Returns
    the same as `run_stages`."""
    parts = get_parts(model)
    unwrap(parts[0]).config.timers = None
    _set_mode(parts, training=False)

    def keep(batch: MicroBatch, output: Tensor) -> tuple[Tensor, T]:
        return output, on_output(batch, output)

    return _schedule(model, info, batches, count, keep, Timers(), forward_only=True)


def _set_mode(parts: Iterable[nn.Module], *, training: bool) -> None:
    """Sets the mode of a pass. Each pass sets its mode, so that no pass depends on the previous pass."""
    for part in parts:
        part.train(training)


def _schedule(
    model: Any,
    info: ParallelInfo,
    batches: Iterable[MicroBatch],
    count: int,
    on_output: OnOutput[T],
    timers: Timers,
    *,
    forward_only: bool,
) -> list[T]:
    parts = get_parts(model)

    def forward_step(iterator: Any, part: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, int, T]]]:
        batch = next(iterator)
        with timers.measure("forward"):
            layout = packed_layout(batch.part, batch.tokens.device, info.cp_group, batch.images)
            layout.routing = batch.routing
            output = stage_output(part, batch.tokens, layout)

        def loss(output: Tensor) -> tuple[Tensor, int, T]:
            value, kept = on_output(batch, output)
            return value, 0, kept  # the loss has its own denominators, so Megatron's token count is not used

        return output, loss

    # with `variable_seq_lengths`, stages send their shapes; the two sizes are required arguments but not used
    with keep_rounded(gradients=not forward_only) if count > 1 else nullcontext():
        results: list[T] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(
                itertools.tee(batches, len(parts))
            ),  # each micro-batch is packed once for all parts
            model=parts,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return results


class _ScheduleTimers:
    """Adapts Megatron's timers (`timers(name, log_level=..).start()`) to `Timers`: `backward`, and `pipeline_wait` for
    sends to and receives from other stages."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._running: dict[str, AbstractContextManager[None]] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Span:
        if name == "backward-compute":
            return _Span(self._timers, "backward", self._running)
        moves = "send" in name or "recv" in name
        return _Span(self._timers, "pipeline_wait" if moves else None, self._running)


class _Span:
    """A span with start and stop. The schedule also reports forward spans, but `_schedule` measures these itself."""

    def __init__(
        self, timers: Timers, name: str | None, running: dict[str, AbstractContextManager[None]]
    ) -> None:
        self._timers, self._name, self._running = timers, name, running

    def start(self, barrier: bool = False) -> None:
        if self._name is not None:
            self._running[self._name] = self._timers.measure(self._name)
            self._running[self._name].__enter__()

    def stop(self, barrier: bool = False) -> None:
        if self._name is not None:
            self._running.pop(self._name).__exit__(None, None, None)


def from_last_stage(info: ParallelInfo, value: T) -> T:
    """Returns the last stage's `value` (plain data) on every stage. Collective over the pipeline."""
    if info.pp_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=info.pp_group, group_src=info.pp_size - 1)
    return box[0]


def tensors_from_last_stage(
    info: ParallelInfo, tensors: dict[int, Tensor], lengths: dict[int, int], width: int = 0
) -> dict[int, Tensor]:
    """Returns the last stage's fp32 tensors per sample, on every stage. Runs one broadcast. All stages must pass the
    same `lengths`, and the `width` of tensors [length, width]."""
    if info.pp_size == 1:
        return tensors
    if not lengths:
        return {}
    if info.last_stage:
        flat = torch.cat([tensors[i].float() for i in lengths])
    else:
        shape = [sum(lengths.values())] + [width] * (width > 0)
        flat = torch.empty(shape, device=info.device)
    dist.broadcast(flat, group=info.pp_group, group_src=info.pp_size - 1)
    return dict(zip(lengths, flat.split(list(lengths.values())), strict=True))
