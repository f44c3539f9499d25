"""Micro-batches through the stages of the model: Megatron's schedule, and what the stages tell each other afterwards.

    pack -> stage_output -> [next stage] -> ... -> loss -> backward -> ... -> [stage before]

Without pipeline parallelism the schedule is one micro-batch after the other; with it, one forward one backward in turns
(1F1B, 2104.04473). Micro-batches may differ in length: the stages tell each other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slime.data.packing import MicroBatch
from slime.megatron_backend.attention import packed_layout
from slime.megatron_backend.model import stage_output, unwrap
from slime.megatron_backend.parallel import ParallelInfo
from slime.tracking.timers import Timers

T = TypeVar("T")

OnOutput = Callable[[MicroBatch, Tensor], tuple[Tensor, T]]
"""(micro-batch, the last stage's output) -> (the loss to go backward from, what to keep of it)."""


def run_stages(
    model: Any,
    info: ParallelInfo,
    batches: Iterable[MicroBatch],
    count: int,
    on_output: OnOutput[T],
    timers: Timers,
) -> list[T]:
    """Forward and backward of `count` micro-batches; gradients add up in the model's buffers, not yet over ranks.

    Returns what `on_output` kept, in order, on the last stage; an empty list on the others. Collective over the ranks
    of the pipeline, and over data-parallel ranks with --overlap-grad-reduce.
    """
    core = unwrap(model).config
    core.timers, core.no_sync_func = _ScheduleTimers(timers), model.no_sync
    return _schedule(model, info, batches, count, on_output, timers, forward_only=False)


def run_forward(
    model: Any,
    info: ParallelInfo,
    batches: Iterable[MicroBatch],
    count: int,
    on_output: Callable[[MicroBatch, Tensor], T],
) -> list[T]:
    """Forward alone of `count` micro-batches, under torch.no_grad() of the caller; returns as `run_stages`."""
    unwrap(model).config.timers = None

    def keep(batch: MicroBatch, output: Tensor) -> tuple[Tensor, T]:
        return output, on_output(batch, output)

    return _schedule(model, info, batches, count, keep, Timers(), forward_only=True)


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
    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, int, T]]]:
        batch = next(iterator)
        with timers.measure("forward"):
            layout = packed_layout(batch.part, batch.tokens.device, info.cp_group)
            layout.routing = batch.routing
            output = stage_output(model, batch.tokens, layout)

        def loss(output: Tensor) -> tuple[Tensor, int, T]:
            value, kept = on_output(batch, output)
            return value, 0, kept  # the loss has its own denominators: Megatron's count of tokens is not used

        return output, loss

    # shapes are told by `variable_seq_lengths`: the two sizes are asked for and not used
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=count,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


class _ScheduleTimers:
    """Megatron's timers as the schedule calls them, `timers(name, log_level=..).start()`, onto ours: `backward`, and
    `pipeline_wait` for sending to and receiving from other stages."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._running: dict[str, AbstractContextManager[None]] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Span:
        if name == "backward-compute":
            return _Span(self._timers, "backward", self._running)
        moves = "send" in name or "recv" in name
        return _Span(self._timers, "pipeline_wait" if moves else None, self._running)


class _Span:
    """One start and stop. The schedule names the spans of the forward too, which `_schedule` measures itself."""

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
    """The last stage's `value` on every stage: plain data. Collective over the pipeline."""
    if info.pp_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=info.pp_group, group_src=info.pp_size - 1)
    return box[0]


def tensors_from_last_stage(
    info: ParallelInfo, tensors: dict[int, Tensor], lengths: dict[int, int]
) -> dict[int, Tensor]:
    """fp32 tensors of the last stage, by sample, on every stage: one broadcast. All stages know the `lengths`."""
    if info.pp_size == 1:
        return tensors
    if not lengths:
        return {}
    if info.last_stage:
        flat = torch.cat([tensors[i].float() for i in lengths])
    else:
        flat = torch.empty(sum(lengths.values()), device=info.device)
    dist.broadcast(flat, group=info.pp_group, group_src=info.pp_size - 1)
    return dict(zip(lengths, flat.split(list(lengths.values())), strict=True))
