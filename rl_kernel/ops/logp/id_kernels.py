"""Triton kernel for the gradient of given ids in a tile. `kept_kernels.pick_` reads these ids' logits.

Legend: C rows, V columns of a tile, K ids of a row. z [C, K] is each id's logit divided by its token's
temperature.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernel.kept import KeptTokens
from rl_kernel.ops.logp.kernels import FLOOR, LOG2E, _dense, _offsets, logits_grad
from rl_kernel.vocab import VocabShard

MOST_IDS = 256
"""Number of ids that a program takes at a time."""


@triton.jit
def _column_grad(z, own, total, h, lse, entropy, inverse, cap, CAPPED: tl.constexpr):
    """Returns d_logit of a column with logit z. The upstream gradient of its log-prob is `own`, a part of the row's
    `total`."""
    log_p = z - lse
    p = tl.exp2(log_p * LOG2E)
    d = (own - total * p - h * p * (tl.maximum(log_p, FLOOR) + entropy)) * inverse
    if CAPPED:
        ratio = z / (inverse * cap)
        d *= 1.0 - ratio * ratio
    return d


@triton.jit(do_not_specialize=["TARGETS", "GRAD_ENTROPY", "real"])
def _ids_grad_kernel(
    OUT, Z, IDS, TARGETS, LOG_PROBS, LSE, ENTROPY, GRAD, GRAD_IDS, TOTAL, GRAD_ENTROPY, INVERSE,
    out_row_stride, out_column_stride, start, real, count, cap,
    PER_TOKEN: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(INVERSE + row).to(tl.float32) if PER_TOKEN else INVERSE
    target = tl.load(TARGETS + row).to(tl.int64)
    lse = tl.load(LSE + row)
    total = tl.load(TOTAL + row)
    grad = tl.load(GRAD + row) if GRAD is not None else 0.0
    h = tl.load(GRAD_ENTROPY + row).to(tl.float32) if GRAD_ENTROPY is not None else 0.0
    entropy = tl.load(ENTROPY + row) if GRAD_ENTROPY is not None else 0.0
    base = OUT + row * out_row_stride
    found = tl.full([], 0, tl.int32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < count
        token = tl.load(IDS + row * count + at, mask=inside, other=-1).to(tl.int64)
        column = token - start
        here = inside & (column >= 0) & (column < real)
        z = tl.load(Z + row * count + at, mask=here, other=-float("inf"))
        own = tl.load(GRAD_IDS + row * count + at, mask=here, other=0.0).to(tl.float32)
        is_target = here & (token == target)
        found += tl.sum(is_target.to(tl.int32), 0)
        own += tl.where(is_target, grad, 0.0)
        d = _column_grad(z, own, total, h, lse, entropy, inverse, cap, CAPPED)
        tl.store(base + _offsets(column, out_column_stride, UNIT), d.to(OUT.dtype.element_ty), mask=here)
    column = target - start
    if (found == 0) & (column >= 0) & (column < real):
        z = tl.load(LOG_PROBS + row) + lse
        d = _column_grad(z, grad, total, h, lse, entropy, inverse, cap, CAPPED)
        tl.store(base + _offsets(column, out_column_stride, UNIT), d.to(OUT.dtype.element_ty))


def as_kept(ids: Tensor) -> KeptTokens:
    """Returns the ids [C, K] in the layout of `pick_`."""
    offsets = torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1]
    return KeptTokens(ids.reshape(-1), offsets)


def ids_logits_grad(
    logits: Tensor,
    z: Tensor,
    ids: Tensor,
    targets: Tensor,
    log_probs: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    shard: VocabShard,
    total: Tensor,
    grad_ids: Tensor,
    grad_entropy: Tensor | None,
    inv_temperature: float | Tensor,
    out: Tensor,
    rounding: torch.dtype | None = None,
    cap: float | None = None,
) -> Tensor:
    """Computes `logits_grad` of a tile [C, V] for upstream gradients `total - grad_ids.sum(1)` of the target's log-prob
    and `grad_ids` [C, K] float32 of the ids' log-probs.

    The first launch writes all columns as if the target had the whole `total` [C]. The second launch overwrites the ids
    and the target from float32 logits, so that no value is rounded twice.
    """
    logits_grad(
        logits, targets, lse, entropy, shard, total, grad_entropy, inv_temperature, out, rounding, cap
    )
    if len(out) and ids.shape[1]:
        own = (total - grad_ids.sum(1)).contiguous()
        _ids_grad_kernel[(len(out),)](
            out, z, ids.contiguous(), targets.contiguous(), log_probs, lse, None if grad_entropy is None else entropy,
            own, grad_ids, total.contiguous(), grad_entropy, _dense(inv_temperature), *out.stride(), shard.start,
            shard.real, ids.shape[1], float(cap or 1), PER_TOKEN=isinstance(inv_temperature, Tensor),
            CAPPED=cap is not None, UNIT=out.stride(1) == 1,
            BLOCK=min(MOST_IDS, triton.next_power_of_2(ids.shape[1])), num_warps=4,
        )  # fmt: skip
    return out
