"""Metrics of the distance between the engine's and the trainer's distribution in a rollout (--get-mismatch-metrics).

Pure functions. A rank's samples have R response tokens. `d = old - rollout` is the difference of a token's log-probs,
and `ratio = exp(d)`. Sums are added over the ranks. A sample without trained tokens does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.ops.ratio_kl.reference import MAX_EXPONENT
from slime.algo.corrections import LARGEST
from slime.algo.importance import compute_ratio

SUMS = (
    "tokens",
    "samples",
    "ratio",
    "ratio_squared",
    "k1",
    "k3",
    "log_ppl",
    "rollout_log_ppl",
    "ppl_ratio",
    "sequence_squared",
)


def sums(old: Tensor, rollout: Tensor, mask: Tensor, sample_of_row: Tensor, samples: int) -> Tensor:
    """Returns the sums that `figures` needs, in the order of SUMS, [10] float64."""
    weights = (mask != 0).double()
    old, rollout = (torch.where(mask != 0, x.double(), 0.0) for x in (old, rollout))
    d = old - rollout
    ratio = compute_ratio(d)

    def sum_samples(values: Tensor) -> Tensor:
        return values.new_zeros(samples).index_add(0, sample_of_row, values)

    lengths = sum_samples(weights)
    real, per = (lengths > 0).double(), lengths.clamp(min=1)
    whole = sum_samples(d)
    return torch.stack(
        [
            weights.sum(),
            real.sum(),
            (ratio * weights).sum(),
            (ratio.square() * weights).sum(),
            -d.sum(),
            ((d.clamp(max=MAX_EXPONENT).expm1() - d) * weights).sum(),
            (sum_samples(-old) / per).sum(),
            (sum_samples(-rollout) / per).sum(),
            (compute_ratio(-whole / per) * real).sum(),
            ((2 * whole).clamp(-LARGEST, LARGEST).exp() * real).sum(),
        ]
    )


def figures(total: list[float]) -> dict[str, float]:
    """Returns the reported metrics, from the sums over all ranks. The result is empty without a trained token.

    Means over tokens: kl `-d` and k3_kl `exp(d) - 1 - d` (both estimate KL(rollout || trainer)), chi2_token
    `ratio^2 - 1`. Means over samples: log_ppl and rollout_log_ppl (nats per token), ppl_ratio `exp(mean(-d))` (the
    trainer's perplexity divided by the engine's), chi2_sequence `exp(2 sum(d)) - 1`. ess is
    `(sum ratio)^2 / (N sum ratio^2)`, the effective sample size of the tokens' weights divided by N (Kish, 1965).
    """
    s = dict(zip(SUMS, total, strict=True))
    if s["tokens"] == 0:
        return {}
    return {
        "kl": s["k1"] / s["tokens"],
        "k3_kl": s["k3"] / s["tokens"],
        "chi2_token": s["ratio_squared"] / s["tokens"] - 1,
        "chi2_sequence": s["sequence_squared"] / s["samples"] - 1,
        "log_ppl": s["log_ppl"] / s["samples"],
        "rollout_log_ppl": s["rollout_log_ppl"] / s["samples"],
        "ppl_ratio": s["ppl_ratio"] / s["samples"],
        "ess": s["ratio"] ** 2 / (s["tokens"] * s["ratio_squared"]),
    }
