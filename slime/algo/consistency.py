"""The difference between the trainer's log-probs and the engine's, as metrics. Pure functions: no ranks, no model.

N active tokens that can be compared. `trainer`, `rollout` [N] fp32: nats of the same token under the same weights;
d = trainer - rollout. Sums, and counts for percentiles, are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

PERCENTILES = (50, 90, 99)
_FIELD_BITS = (11, 10, 10)
"""The 31 bits of a non-negative float32, in the parts that `order_statistics` counts one after another."""


@dataclass(frozen=True)
class TokenSums:
    """Sums over tokens, float64. `clipped`: tokens whose ratio exp(d) leaves [1 - eps_clip, 1 + eps_clip_high]."""

    tokens: float = 0.0
    bitwise_equal: float = 0.0
    clipped: float = 0.0
    dlogp: float = 0.0
    abs_dlogp: float = 0.0
    ratio: float = 0.0
    k3: float = 0.0

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def token_sums(trainer: Tensor, rollout: Tensor, *, eps_clip: float, eps_clip_high: float) -> TokenSums:
    """The sums of one rank. Deterministic for given tensors; one wait for the device.

    `k3 = expm1(d) - d`, whose mean estimates KL(rollout || trainer) without bias on samples of the rollout
    (Schulman, "Approximating KL divergence"). Bitwise equal: the same 32 bits, so 0.0 and -0.0 differ.
    """
    d = trainer.double() - rollout.double()
    excess = torch.expm1(d)
    ratio = 1 + excess
    sums = (
        torch.ones_like(d),
        trainer.view(torch.int32) == rollout.view(torch.int32),
        (ratio < 1 - eps_clip) | (ratio > 1 + eps_clip_high),
        d,
        d.abs(),
        ratio,
        excess - d,
    )
    return TokenSums(*torch.stack([x.double().sum() for x in sums]).tolist())


def order_statistics(
    values: Tensor, ranks: list[int], add_up: Callable[[Tensor], None] = lambda counts: None
) -> list[float]:
    """`values.sort()[0][ranks]` over the values of all processes, exactly, without moving the values.

    `values` [N] float32, finite and not negative: as integers their bits are in the same order, so a histogram of the
    first 11 bits tells which bin holds a rank, one of the next 10 bits in that bin which sub-bin, and the last 10 bits
    name the value. `add_up` adds an int64 tensor up over the processes, in place; it is called three times with at most
    2048 counts for each rank, however many tokens there are. `ranks` count from 0 over all processes.
    """
    held = {0: values.contiguous().view(torch.int32)}  # what begins with each prefix that is still looked at
    shift = sum(_FIELD_BITS)
    prefixes, left = [0] * len(ranks), list(ranks)
    for width in _FIELD_BITS:
        shift -= width
        last = (1 << width) - 1
        histograms = {p: torch.bincount(bits >> shift & last, minlength=last + 1) for p, bits in held.items()}
        counts = torch.stack([histograms[prefix] for prefix in prefixes])
        add_up(counts)
        below = counts.cumsum(1).cpu()
        for i, rank in enumerate(left):
            field = int(torch.searchsorted(below[i], rank, right=True))
            assert field <= last, "a rank must be below the number of values"
            left[i] = rank - (int(below[i, field - 1]) if field else 0)
            prefixes[i] = prefixes[i] << width | field
        held = {p: (bits := held[p >> width])[bits >> shift == p] for p in set(prefixes)}
    return torch.tensor(prefixes, dtype=torch.int32).view(torch.float32).tolist()


def percentile_ranks(tokens: int) -> list[int]:
    """Places of PERCENTILES in sorted order, from 0: the smallest value that p% of the tokens do not exceed."""
    return [-(-p * tokens // 100) - 1 for p in PERCENTILES]


def figures(sums: TokenSums, percentiles: list[float], largest: float) -> dict[str, float]:
    """What is reported of at least one token, by name. Nats, but for the counts, the fraction and the ratio."""
    n = sums.tokens
    return {
        "dlogp_mean": sums.dlogp / n,
        "abs_dlogp_mean": sums.abs_dlogp / n,
        **{f"abs_dlogp_p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)},
        "abs_dlogp_max": largest,
        "ratio_mean": sums.ratio / n,
        "clip_fraction": sums.clipped / n,
        "k3": sums.k3 / n,
        "bitwise_equal_tokens": sums.bitwise_equal,
    }
