"""The view of a micro-batch that hooks get under context parallelism, and the functions with which they slice and
gather it.

A rank of the context-parallel group sees its own response tokens: in each sample, the tokens that the rank's two runs
of the sequence predict (`slime.data.token_slice`), in their order. Runs are nearly equal parts without padding. A
hook's loss is this rank's part: the ranks' parts are added, and `all_gather_with_cp` adds up their gradients.

Shapes: R_i response tokens of sample i, r_i the response tokens of this rank; R and r are their sums over a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slime.algo.importance import weighted
from slime.algo.token_columns import HookView
from slime.data.packing import MicroBatch
from slime.data.token_slice import run_bounds
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.heads.head import whole

Bounds = tuple[int, int]
PerToken = TypeVar("PerToken", Tensor, list[float])


def hook_view(
    batch: MicroBatch, total_lengths: list[int], response_lengths: list[int], ranks: ParallelInfo
) -> HookView:
    """Returns this rank's part of a micro-batch's response tokens, for hooks. The view's functions are collective over
    context-parallel ranks."""
    mine = batch.mine
    if mine is None:
        return HookView(response_lengths)
    position = {"cp_rank": ranks.cp_rank, "cp_size": ranks.cp_size}
    lengths = [
        sum(stop - start for start, stop in response_bounds(total, response, **position))
        for total, response in zip(total_lengths, response_lengths, strict=True)
    ]
    return HookView(
        lengths,
        local=lambda x: _Local.apply(x, mine, ranks.cp_group),
        whole=lambda x: whole(x, batch, ranks),
        total=lambda x: _RankSum.apply(x, ranks.cp_group),
    )


def response_bounds(
    total_length: int, response_length: int, *, cp_rank: int | None = None, cp_size: int | None = None
) -> list[Bounds]:
    """Returns (start, stop) of the response tokens that each run of a rank predicts, counted from the first response
    token."""
    size = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
    rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
    first = total_length - response_length - 1  # the position that predicts response token 0
    bounds = [
        (max(start - first, 0), min(stop - first, response_length))
        for start, stop in run_bounds(total_length, rank, size)
    ]
    return [(start, stop) if start < stop else (0, 0) for start, stop in bounds]


def get_logits_and_tokens_offset_with_cp(
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    *,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> tuple[int, tuple[Bounds, ...], tuple[Bounds, ...], tuple[Bounds, ...]]:
    """Returns (longest run, runs, positions that predict response tokens, these tokens) of a rank in one sequence.

    The last three have one (start, stop) per run, counted from the start of the prompt; (0, 0) if a run predicts no
    response token. `max_seq_len` is not read. Raises ValueError for a `qkv_format` other than thd.
    """
    if qkv_format != "thd":
        raise ValueError(f"qkv_format must be thd, got {qkv_format}; sequences are packed, never padded")
    size = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
    rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
    prompt = total_length - response_length
    of_response = response_bounds(total_length, response_length, cp_rank=rank, cp_size=size)
    tokens = tuple((a + prompt, b + prompt) if b else (0, 0) for a, b in of_response)
    logits = tuple((a + prompt - 1, b + prompt - 1) if b else (0, 0) for a, b in of_response)
    return -(-total_length // (2 * size)), tuple(run_bounds(total_length, rank, size)), logits, tokens


def slice_log_prob_with_cp(
    log_prob: PerToken, total_length: int, response_length: int, *_: Any, **__: Any
) -> PerToken:
    """Maps [R_i] to [r_i]: this rank's part of a sample's column, a tensor or a list. Further arguments are not
    read."""
    if len(log_prob) != response_length:
        raise ValueError(
            f"log_prob must have one entry per response token, got {len(log_prob)} for {response_length}; "
            "all_gather_with_cp makes whole columns"
        )
    parts = [log_prob[start:stop] for start, stop in response_bounds(total_length, response_length)]
    if isinstance(log_prob, list):
        return [value for part in parts for value in part]
    return torch.cat(parts)


def slice_with_cp(tokens: Tensor, pad_value: Any = None, *_: Any, **__: Any) -> Tensor:
    """Maps [L, ...] to this rank's tokens of a sequence. Nothing is padded, so that `pad_value` is not read."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    return torch.cat([tokens[start:stop] for start, stop in run_bounds(len(tokens), rank, size)])


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Maps [r_i, ...] per rank to [R_i, ...] on all ranks. Collective; the backward adds up the ranks'
    gradients."""
    bounds = response_bounds(total_length, response_length)
    if len(tensor) != (rows := sum(stop - start for start, stop in bounds)):
        raise ValueError(
            f"tensor must have one row per response token of this rank, got {len(tensor)} for {rows} of "
            f"{response_length}; slice_log_prob_with_cp makes such a part"
        )
    if parallel_state.get_context_parallel_world_size() == 1:
        return tensor
    mine = torch.cat([torch.arange(start, stop) for start, stop in bounds]).to(tensor.device)
    gathered: Tensor = _Gather.apply(
        tensor, mine, response_length, parallel_state.get_context_parallel_group()
    )
    return gathered


def get_sum_of_sample_mean(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    sample_denoms: list[Tensor] | Tensor | bool | None = None,
    calculate_per_token_loss: bool = False,
    *_: Any,
    **__: Any,
) -> Callable[[Tensor], Tensor]:
    """Returns fn([r, ...]), which computes this rank's part of `Σ_i (x_i * mask_i).sum() / max(mask_i.sum(), 1)`.

    `sample_denoms` replaces the sums of the masks. With `calculate_per_token_loss` nothing is divided. `loss_masks` are
    whole, [R_i]. The fourth argument may be `calculate_per_token_loss`, as in older versions of slime.
    """
    if isinstance(sample_denoms, bool):
        calculate_per_token_loss = sample_denoms
    own_denoms = None if isinstance(sample_denoms, bool) else sample_denoms
    denoms = [mask.sum() for mask in loss_masks] if own_denoms is None else own_denoms
    columns = zip(total_lengths, response_lengths, loss_masks, denoms, strict=True)
    weights = torch.cat(
        [
            slice_log_prob_with_cp(mask, total, response)
            / (1.0 if calculate_per_token_loss else torch.as_tensor(denom).clamp(min=1))
            for total, response, mask, denom in columns
        ]
    )
    return lambda x: weighted(x, weights).sum()


class _Local(torch.autograd.Function):
    """Autograd function `x[mine]`. The backward merges all ranks' gradients, so that each rank has the gradient
    of the whole x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine)
        ctx.shape, ctx.group = x.shape, group
        return x.index_select(0, mine)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (mine,) = ctx.saved_tensors
        out = upstream.new_zeros(ctx.shape).index_copy_(0, mine, upstream)
        dist.all_reduce(out, group=ctx.group)
        return out, None, None


class _RankSum(torch.autograd.Function):
    """Autograd function that sums `x` over ranks. Each rank continues with the same loss, so its own x has the upstream
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


class _Gather(torch.autograd.Function):
    """Autograd function that joins all ranks' parts to one tensor. Each rank uses it for its own part of the
    loss, so gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mine: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine)
        ctx.group = group
        out = x.new_zeros(rows, *x.shape[1:]).index_copy_(0, mine, x)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (mine,) = ctx.saved_tensors
        total = upstream.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.index_select(0, mine), None, None, None
