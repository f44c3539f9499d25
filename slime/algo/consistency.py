"""Metrics of the difference between the trainer's log-probs and the engine's. Pure functions: no ranks, no model.

N trained tokens can be compared. `trainer` and `rollout` [N] fp32 are log-probs in nats for the same token under the
same weights, and d = trainer - rollout. Sums, and counts for percentiles, are added over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

PERCENTILES = (50, 90, 99)
_FIELD_BITS = (11, 10, 10)
"""Widths of the three parts of a non-negative float32's 31 bits. `order_statistics` counts one part after another."""


@dataclass(frozen=True)
class TokenSums:
    """Sums over tokens, float64. `clipped` counts the tokens whose ratio exp(d) is outside [1 - eps_clip,
    1 + eps_clip_high]."""

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
    """Returns a rank's sums. The result is deterministic for given tensors, and waits for the device once.

    The mean of `k3 = expm1(d) - d` estimates KL(rollout || trainer) without bias on samples of the rollout
    (Schulman, "Approximating KL divergence"). Bitwise equal tokens have the same 32 bits, so 0.0 and -0.0 differ.
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
    """Returns `values.sort()[0][ranks]` over all processes' values. The result is exact, and no process sends its
    values.

    `values` [N] float32 are finite and not negative, so their bits as integers have the same order. A histogram of the
    first 11 bits gives the bin of a rank, a histogram of the next 10 bits gives the bin within this bin, and the last
    10 bits give the value. `add_up` adds an int64 tensor over the processes, in place. It is called three times with at
    most 2048 counts for each rank, for any number of tokens. `ranks` count from 0 over all processes.
    """
    held = {0: values.contiguous().view(torch.int32)}  # bits of the values with each prefix of a rank
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
    """Returns the indices of PERCENTILES in sorted order, from 0. A percentile is the smallest value that p% of the
    tokens do not exceed."""
    return [-(-p * tokens // 100) - 1 for p in PERCENTILES]


def figures(sums: TokenSums, percentiles: list[float], largest: float) -> dict[str, float]:
    """Returns the reported metrics by name, for at least one token. Values are nats, except for counts, fraction and
    ratio."""
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
