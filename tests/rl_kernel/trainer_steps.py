"""Provides the calls of a trainer or an engine to rl_kernel in each step, for any number of tokens.

Each kernel of rl_kernel runs in one of the steps. The values have no meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from rl_kernel import (
    expert_combine,
    expert_dispatch,
    group_advantage,
    grpo_loss,
    linear_logp,
    linear_token_loss,
    linear_top,
    logp,
    masked_mean,
    masked_whiten,
    ratio_kl,
    rotary,
    swiglu,
)
from rl_kernel.fp8 import fast
from rl_kernel.invariant import kernels as invariant
from rl_kernel.invariant.kernels.experts import TILES as EXPERT_TILES
from rl_kernel.invariant.kernels.product import TILES
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.expert_rows.kernels import gather_sum
from rl_kernel.ops.rotary.kernels import rotate
from rl_kernel.stacked import kernels as stacked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, VOCAB, REAL = 32, 4880, 4875
"""Sizes of the layer; its last columns are padding."""
FP8_INPUTS, FP8_OUTPUTS = 128, 256
MIB = 2**20
SIZES = (300, 32, 1, 15, 16, 17, 33, 128, 301, 1999, 2100)
LONG = (5000, 4100, 8193, 16_384, 65_536)
STARTS = (0, 1, 3)


class Batch:
    """The inputs of a step with `tokens` tokens. Its columns are views that begin after `start` other tokens."""

    def __init__(self, tokens: int, start: int) -> None:
        self.tokens, self.start = tokens, start

    def column(self, *shape: int, dtype: torch.dtype = FP32, leaf: bool = False) -> Tensor:
        """Returns ones with the shape [tokens, *shape]."""
        whole = torch.ones(self.start + self.tokens, *shape, dtype=dtype, device=DEVICE)
        return whole[self.start :].requires_grad_(leaf)

    def kept(self) -> KeptTokens:
        """Returns a kept set in which every token but the last has some ids."""
        found = KeptTokens.from_lists([[1, 2, 5]] * (self.tokens - 1) + [[]], DEVICE)
        ids, offsets = (
            torch.cat([x.new_zeros(self.start), x])[self.start :] for x in (found.ids, found.offsets)
        )
        return KeptTokens(ids, offsets)


def weight_of(dtype: torch.dtype) -> Tensor:
    return torch.ones(VOCAB, HIDDEN, dtype=dtype, device=DEVICE, requires_grad=True)


def backward(outputs: object, *upstream: Tensor) -> None:
    found = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(x, Tensor)]
    torch.autograd.backward(found, list(upstream))


def layer(dtype: torch.dtype, **options: object) -> Callable[[Batch], None]:
    """Returns a step that calls `linear_logp`, without a gradient and with one. The options are made for each batch."""

    def step(batch: Batch) -> None:
        hidden, targets = batch.column(HIDDEN, dtype=dtype, leaf=True), batch.column(dtype=torch.int64)
        made = {name: value(batch) if callable(value) else value for name, value in options.items()}
        call = lambda: linear_logp(  # noqa: E731
            hidden, weight_of(dtype), targets, vocab_size=REAL, return_entropy=True, impl="triton", **made
        )
        with torch.no_grad():
            call()
        log_probs, entropy, *id_log_probs = call()
        upstream = [batch.column(), batch.column(), *(batch.column(x.shape[1]) for x in id_log_probs)]
        torch.autograd.backward([log_probs, entropy, *id_log_probs], upstream)
        backward(call()[0], batch.column())

    return step


def room(fixed: int, per_token: int) -> Callable[[Batch], int]:
    """Returns the size of a workspace with all columns of a few tokens. With more tokens, its tiles become narrower."""
    return lambda batch: fixed + per_token * batch.tokens


def three_ids(batch: Batch) -> Tensor:
    return batch.column(3, dtype=torch.int64).cumsum(1)


def temperatures(batch: Batch) -> Tensor:
    return batch.column()


def one_pass(dtype: torch.dtype, mib: int) -> Callable[[Batch], None]:
    def step(batch: Batch) -> None:
        def loss(log_probs: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            return (log_probs * batch.column()[rows]).sum() + entropy.sum(), {}

        hidden, targets = batch.column(HIDDEN, dtype=dtype, leaf=True), batch.column(dtype=torch.int64)
        found = linear_token_loss(
            hidden,
            weight_of(dtype),
            targets,
            loss,
            return_entropy=True,
            workspace_bytes=mib * MIB,
            impl="triton",
        )
        found.loss.backward(batch.column()[0])

    return step


def top(batch: Batch) -> None:
    hidden, targets = batch.column(HIDDEN, dtype=BF16), batch.column(dtype=torch.int64)
    linear_top(hidden, weight_of(BF16), targets, 4, workspace_bytes=20 * MIB, impl="triton")


def logits(batch: Batch) -> None:
    for options in ({}, {"keep_mask": batch.kept()}, {"temperature": temperatures(batch)}):
        given = batch.column(VOCAB, leaf=True)
        targets = batch.column(dtype=torch.int64)
        out = logp(given, targets, vocab_size=REAL, return_entropy=True, impl="triton", **options)
        backward(out, batch.column(), batch.column())
        if batch.tokens > 1:
            # Neighbours in memory belong to one column.
            turned = given.detach().t().contiguous().t().requires_grad_()
            backward(logp(turned, targets, vocab_size=REAL, impl="triton", **options), batch.column())


def losses(batch: Batch) -> None:
    leaves = {"log_probs": batch.column(leaf=True), "entropy": batch.column(leaf=True)}
    names = ("old_log_probs", "advantages", "denominators", "tis_weights", "ref_log_probs")
    others = {name: batch.column() for name in names}
    mask = batch.column(dtype=torch.bool)
    loss, _ = grpo_loss(**leaves, **others, mask=mask, entropy_coef=0.1, kl_coef=0.1, impl="triton")
    loss.backward(batch.column()[0])
    new = batch.column(leaf=True)
    ratio, kl = ratio_kl(new, batch.column(), batch.column(), mask, impl="triton")
    torch.autograd.backward([ratio, kl], [batch.column(), batch.column()])
    ratio, kl = ratio_kl(new, batch.column(), batch.column(), impl="triton")
    (ratio.sum() + kl.sum()).backward()


def reductions(batch: Batch) -> None:
    values, mask = batch.column(leaf=True), batch.column(dtype=torch.bool)
    masked_mean(values, mask, impl="triton").backward(batch.column()[0])
    backward(masked_whiten(values, mask, impl="triton"), batch.column())


def advantages(batch: Batch) -> None:
    rewards, groups, rollouts = (
        batch.column(),
        batch.column(dtype=torch.int64),
        batch.column(dtype=torch.int64),
    )
    group_advantage(rewards, groups, rollout_ids=rollouts, impl="triton")


def decoder_layer(batch: Batch) -> None:
    x = batch.column(2 * HIDDEN, dtype=BF16, leaf=True)
    backward(swiglu(x, impl="triton"), batch.column(HIDDEN, dtype=BF16))
    row = batch.column(6, HIDDEN, dtype=BF16, leaf=True)  # query heads, key heads, value heads
    angles = batch.column(1, HIDDEN // 2)
    backward(rotary(row[:, :4], angles, angles, impl="triton"), batch.column(4, HIDDEN, dtype=BF16))


def experts(batch: Batch) -> None:
    """All tokens have the same two experts; one expert is on another rank."""
    x, weights = batch.column(HIDDEN, dtype=BF16, leaf=True), batch.column(2, leaf=True)
    rows = batch.column(2, dtype=torch.int32).cumsum(0, dtype=torch.int32) - 1
    rows[:, 1] = -1
    permuted, factors = expert_dispatch(x, weights, rows, batch.tokens, impl="triton")
    gated = swiglu(permuted, factors, impl="triton")
    out = expert_combine(torch.cat((gated, gated), 1), rows, impl="triton")
    backward(out, batch.column(HIDDEN, dtype=BF16))


def bitwise_layer(batch: Batch) -> None:
    x, gain = batch.column(HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16, device=DEVICE)
    invariant.linear(x, weight_of(BF16).detach(), None, TILES[-1])
    invariant.rms_norm(x, gain, 1e-6)
    invariant.rms_norm(x, gain, 1e-6, x)
    invariant.rms_norm(batch.column(6, HIDDEN, dtype=BF16)[:, :4], gain, 1e-6)
    table, places = torch.ones(2, 50, 1, HIDDEN // 2, device=DEVICE), batch.column(dtype=torch.int64)
    rotate(batch.column(6, HIDDEN, dtype=BF16)[:, :4], *table, back=False, positions=places)
    invariant.log_softmax(torch.ones(batch.tokens, 3 * 8192 - 5, device=DEVICE))


def bitwise_experts(batch: Batch) -> None:
    """A token has two of seven experts."""
    ids = invariant.choose_experts(batch.column(7), 2)
    rows, ends = invariant.expert_rows(ids, 7)
    x = batch.column(2, HIDDEN, dtype=BF16).flatten(0, 1)
    weights = torch.ones(7, 3 * HIDDEN, HIDDEN, dtype=BF16, device=DEVICE)
    for tile, dtype in itertools.product(EXPERT_TILES, (BF16, FP32)):
        outputs = invariant.expert_products(x, ends, weights, dtype, tile)
    gather_sum(outputs, None, rows, BF16)


def stacked_sums(batch: Batch) -> None:
    parts = batch.column(3, dtype=BF16)  # the totals are as large as the parts
    totals = torch.ones(len(parts), 3, device=DEVICE)
    starts = torch.tensor([total.data_ptr() for total in totals], dtype=torch.int64, device=DEVICE)
    stacked.add_stacked(starts, parts)


def bitwise_attention(batch: Batch) -> None:
    """Packed queries are two sequences. Paged queries are one query for each of `tokens` sequences."""
    rows = batch.column(6, HIDDEN, dtype=BF16)
    query, key, value = rows.split([4, 1, 1], 1)
    tokens = batch.tokens
    bounds = torch.tensor([*[0] * batch.start, 0, tokens // 2, tokens], dtype=torch.int32, device=DEVICE)
    bounds = bounds[batch.start :]
    lse = torch.empty(4, tokens, device=DEVICE)
    out = torch.empty(query.shape, dtype=BF16, device=DEVICE)
    longest = max(8, tokens)  # fewer rows use a separate kernel
    for window in (None, 100):
        invariant.attention(
            *(query, key, value, out, bounds, bounds.diff(), longest, 0.1),
            **{"first_key": bounds, "lse": lse, "window": window},
        )
    pages = torch.ones(7, 1, 16, 2 * HIDDEN, dtype=BF16, device=DEVICE).transpose(1, 2)
    table = torch.zeros(batch.start + tokens, tokens, dtype=torch.int32, device=DEVICE)
    first = torch.arange(batch.start + tokens + 1, dtype=torch.int32, device=DEVICE)[batch.start :]
    lengths = batch.column(dtype=torch.int32)
    for window in (None, 100):
        invariant.attention(
            *(query, *pages.split(HIDDEN, -1), out, first, lengths, 1, 0.1),
            **{"table": table[batch.start :], "window": window},
        )


def fp8_layers(batch: Batch) -> None:
    """A linear layer in fp8, and two experts that share its rows."""
    x, upstream = batch.column(FP8_INPUTS, dtype=BF16), batch.column(FP8_OUTPUTS, dtype=BF16)
    weights = torch.ones(2, FP8_OUTPUTS, FP8_INPUTS, dtype=BF16, device=DEVICE)
    ends = torch.tensor([batch.tokens // 2, batch.tokens], dtype=torch.int32, device=DEVICE)
    for given, stops in ((weights[:1], None), (weights, ends)):
        both = fast.round_weights(given, False)
        _, columns = fast.outputs_and_columns(x, both, stops, False, True)
        rounded = fast.round_upstream(upstream, stops, False)
        fast.input_gradients(rounded, both, stops, False)
        fast.weight_gradients(rounded, columns, stops, False, BF16)
        if stops is not None:
            totals = list(torch.zeros(2, FP8_OUTPUTS, FP8_INPUTS, device=DEVICE))
            fast.add_expert_gradients(rounded, columns, stops, False, totals)


STEPS: dict[str, Callable[[Batch], None]] = {
    "exponentials": layer(BF16),
    "exponentials of tiles": layer(BF16, workspace_bytes=room(MIB // 4, 3000)),
    "exponentials by temperatures": layer(BF16, temperature=temperatures),
    "logits": layer(FP32),
    "logits of tiles": layer(FP32, workspace_bytes=room(MIB // 2, 15_000)),
    "logits by temperatures": layer(FP32, temperature=temperatures, logit_cap=30.0),
    "kept tokens": layer(BF16, keep_mask=Batch.kept, workspace_bytes=room(MIB // 4, 5000)),
    "ids": layer(BF16, ids=three_ids, workspace_bytes=room(MIB // 4, 5000)),
    "one pass of exponentials": one_pass(BF16, 2),
    "one pass of logits": one_pass(FP32, 6),
    "top": top,
    "logp": logits,
    "losses": losses,
    "reductions": reductions,
    "advantages": advantages,
    "decoder layer": decoder_layer,
    "experts": experts,
    "bitwise layer": bitwise_layer,
    "bitwise experts": bitwise_experts,
    "stacked sums": stacked_sums,
    "bitwise attention": bitwise_attention,
    "fp8 layers": fp8_layers,
}
"""Steps of a trainer or an engine, each with fixed options."""
