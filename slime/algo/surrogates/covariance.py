"""Clip-Cov and KL-Cov (2505.22617) treat the tokens whose log-prob and advantage covary most, as these lower the
entropy.

The covariance of a token is `(old - old.mean()) * (A - A.mean())`, with means over the trained tokens of
the rollout on all ranks. `old` are log-probs of the policy before the rollout's first step, so that the choice does not
depend on micro-batches or ranks. The tokens are chosen once per rollout, in the column chosen_tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.surrogates.clip import CLIPS, below_one, clipped
from slime.algo.surrogates.record import Surrogate
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config
    from slime.config.sections.algorithm import AlgorithmConfig


def covariance(advantages: Tensor, old_log_probs: Tensor, group: ProcessGroup | None) -> tuple[Tensor, int]:
    """Returns `(old - old.mean()) * (A - A.mean())` [N] float32, with means over `group`, and the number of tokens on
    all ranks of `group`."""
    import torch

    pair = torch.stack([advantages.double(), old_log_probs.double()])
    sums = _summed(torch.stack([*pair.sum(1), pair.new_tensor(pair.shape[1])]), group)
    count = int(sums[2])
    centred = pair - (sums[:2] / max(count, 1))[:, None]
    return centred.prod(0).float(), count


def uniform(keys: Tensor) -> Tensor:
    """Returns a number in [0, 1) for each int64 key, float32 [N]. A key has the same number on every rank (32-bit
    xor-shift hash)."""
    x = (keys * 2654435761) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)).bitwise_right_shift(8).float() / 2**24


def at_most(count: int, values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns 1.0 for the `count` smallest finite `values` >= 0 over all ranks, [N] float32. A tie at the last value
    adds more tokens."""
    from slime.algo.consistency import order_statistics

    finite = values[values.isfinite()]
    total = int(_summed(finite.new_tensor([finite.numel()]).double(), group))
    if total <= count:
        return values.isfinite().float()
    last = order_statistics(finite, [count - 1], lambda counts: _add_up(counts, group))[0]
    return (values <= last).float()


def _choose_band(
    algorithm: AlgorithmConfig, advantages: Tensor, old: Tensor, keys: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Chooses max(1, ratio * N) random tokens between the bounds of Clip-Cov, where N is the rollout's number of
    tokens."""
    import torch

    found, count = covariance(advantages, old, group)
    inside = (found > algorithm.clip_cov_lb) & (found < algorithm.clip_cov_ub)
    draws = torch.where(inside, uniform(keys), torch.inf)
    return at_most(max(1, int(algorithm.clip_cov_ratio * count)), draws, group)


def _largest(
    algorithm: AlgorithmConfig, advantages: Tensor, old: Tensor, keys: Tensor, group: ProcessGroup | None
) -> Tensor:
    """Chooses the max(1, ratio * N) tokens with the largest covariance above 0, for KL-Cov."""
    import torch

    found, count = covariance(advantages, old, group)
    # x is positive, so 1 / x reverses the order
    smallest = torch.where(found > 0, found.reciprocal(), torch.inf)
    return at_most(max(1, int(algorithm.kl_cov_ratio * count)), smallest, group)


def _without_chosen(c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Returns PPO's clipped term, and 0 for each chosen token (Clip-Cov)."""
    loss, active = clipped(c, t, log_probs, ppo_kl)
    keep = 1 - t["chosen_tokens"]
    return loss * keep, active * keep + t["chosen_tokens"]


def _held_back(c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `-ratio * A`, plus `kl_cov_coef * abs(log_ratio)` for each chosen token (KL-Cov). Nothing is clipped."""
    import torch

    from slime.algo.importance import compute_ratio, weighted

    loss = -compute_ratio(-ppo_kl) * t["advantages"]
    return loss + c.algorithm.kl_cov_coef * weighted(ppo_kl.abs(), t["chosen_tokens"]), torch.zeros_like(
        ppo_kl
    )


def _summed(values: Tensor, group: ProcessGroup | None) -> Tensor:
    _add_up(values, group)
    return values


def _add_up(values: Tensor, group: ProcessGroup | None) -> None:
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(values, group=group)


def _ordered_band(c: Config) -> None:
    if c.algorithm.clip_cov_lb >= c.algorithm.clip_cov_ub:
        raise FlagError(
            "--clip-cov-lb",
            "be below --clip-cov-ub",
            f"{c.algorithm.clip_cov_lb} and {c.algorithm.clip_cov_ub}",
            "no token could be chosen",
        )


def _own_advantages(c: Config) -> None:
    algorithm = c.algorithm
    if algorithm.custom_advantage_function_path or algorithm.disable_compute_advantages_and_returns:
        name = (
            "--custom-advantage-function-path"
            if algorithm.custom_advantage_function_path
            else "--disable-compute-advantages-and-returns"
        )
        raise FlagError(
            name,
            f"be left out with --pg-loss-type {algorithm.pg_loss_type}",
            "both",
            "tokens are chosen when the advantages are computed",
        )


_READS = frozenset({"old_log_probs"})
CLIP_COV = Surrogate(
    "clip_cov",
    "clipped ratio per token; no gradient for a few tokens of high covariance",
    _without_chosen,
    source="2505.22617",
    reads=_READS,
    flags=CLIPS | {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
    choose=_choose_band,
    aliases=("clip-cov",),
    checks=(_own_advantages, _ordered_band, below_one),
)
KL_COV = Surrogate(
    "kl_cov",
    "`-ratio_t A_t`; a KL to the old policy for the tokens of the highest covariance",
    _held_back,
    source="2505.22617",
    reads=_READS,
    flags=frozenset({"kl_cov_ratio", "kl_cov_coef"}),
    choose=_largest,
    aliases=("kl-cov",),
    checks=(_own_advantages,),
)
