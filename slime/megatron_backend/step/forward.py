"""A forward pass without gradient over all samples of a rank: their log-probs (old, reference, replay)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slime.data.packing import MicroBatch
from slime.megatron_backend.step.head import LmHead
from slime.megatron_backend.step.pipeline import run_forward, tensors_from_last_stage


@torch.no_grad()
def log_probs_of_data(
    head: LmHead,
    batches: Iterable[MicroBatch],
    count: int,
    response_lengths: list[int],
    samples: Iterable[int] | None = None,
) -> dict[int, Tensor]:
    """Log-probs by the model of `head`, by sample: fp32 tensors [response length], nats.

    `count` micro-batches hold `samples`, which are all samples of the rank if None. Collective over tensor-, context-
    and pipeline-parallel ranks.
    """

    def parts(batch: MicroBatch, output: Tensor) -> list[tuple[int, Tensor]]:
        log_probs, _ = head.log_probs(batch, output, "none")
        return list(zip(batch.samples, batch.split(log_probs, response_lengths), strict=True))

    kept = run_forward(head.model, head.ranks, batches, count, parts)
    found = dict(pair for of_batch in kept for pair in of_batch)
    wanted = range(len(response_lengths)) if samples is None else samples
    return tensors_from_last_stage(head.ranks, found, {i: response_lengths[i] for i in wanted})
