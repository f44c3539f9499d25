"""REINFORCE (Williams, 1992): the log-prob times the advantage, without a ratio. 2609.20807 adds centred scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.surrogates.record import Surrogate
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algo.token_columns import TokenColumns
    from slime.config.schema import Config
    from slime.config.sections.off_policy import OffPolicyConfig

LEAST_TAIL = 1e-6
"""Least probability outside of the top-k, on both sides (2609.20807, appendix A.3)."""


def _log_prob(c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `-A * log_probs`. Nothing is clipped."""
    import torch

    return -t["advantages"] * log_probs, torch.zeros_like(ppo_kl)


def centering(
    off_policy: OffPolicyConfig,
    log_p: Tensor,
    log_q: Tensor,
    known: Tensor,
    *,
    least_tail: float = LEAST_TAIL,
) -> Tensor:
    """Returns each token's centering term, [R]. `log_p` and `log_q` [R, K] are log-probs of the policy p and of
    the sampler q at the sampler's top-k ids. `known` is true where there is an id.

    `((w * q - alpha * p).detach() * log_p).sum(1)`, `alpha = rho * f(1 / rho)`, `rho = (1 - q.sum(1)) / (1 -
    p.sum(1))`, `w = f(p / q)`; f is the weight of --use-tis, else 1. The gradient of the term is the expectation of the
    weighted score under q in the top-k and rho * p in the tail (2609.20807). `p` and `q` are probabilities of the whole
    vocabulary, not of the top-k alone.
    """
    import torch

    from slime.algo.corrections import bounded
    from slime.algo.importance import compute_ratio

    with torch.no_grad():
        p, q = (torch.where(known, x.exp(), 0) for x in (log_p, log_q))
        tails = [(1 - x.sum(1)).clamp(min=least_tail) for x in (q, p)]
        rho = tails[0] / tails[1]
        weights, of_tail = torch.ones_like(q), torch.ones_like(rho)
        if off_policy.use_tis:
            ratio = torch.where(known, compute_ratio(log_p - log_q), 0)
            weights, of_tail = bounded(off_policy, ratio), bounded(off_policy, 1 / rho)
        coefficients = weights * q - (rho * of_tail)[:, None] * p
    return (torch.where(known, coefficients, 0) * torch.where(known, log_p, 0)).sum(1)


def _centred(c: Config, t: TokenColumns, log_probs: Tensor, ppo_kl: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `-A * (w * log_probs - centering)`, where w is the weight of --use-tis for the sampled token (else 1).
    The caller multiplies the result by no weight."""
    import torch

    from slime.algo.corrections import bounded
    from slime.algo.importance import compute_ratio

    advantages = t["advantages"]
    assert t.of_ids is not None, "every head computes them for a loss that reads ids"
    term = centering(c.off_policy, t.of_ids, t["rollout_top_log_probs"], t["rollout_top_ids"] >= 0)
    weighted = log_probs
    if c.off_policy.use_tis:
        weighted = (
            bounded(c.off_policy, compute_ratio(log_probs.detach() - t["rollout_log_probs"])) * log_probs
        )
    return -advantages * (weighted - term), torch.zeros_like(ppo_kl)


def _whole_distribution(c: Config) -> None:
    """Raises ValueError unless engine and trainer compute probabilities of the whole vocabulary and a weight is for one
    token."""
    rollout, off_policy = c.rollout, c.off_policy
    if c.algorithm.pg_loss_type not in (None, REINFORCE_LOSS.name):
        raise FlagError(
            "--use-score-centering",
            f"be used with --pg-loss-type {REINFORCE_LOSS.name}",
            c.algorithm.pg_loss_type,
            "a clipped ratio has no expectation over the top-k: leave --pg-loss-type out",
        )
    if not c.algorithm.score_centering_top_k:
        raise FlagError(
            "--score-centering-top-k",
            "be above 0 with --use-score-centering",
            "0",
            "the expectation is over the engine's likeliest tokens: 128 is the default",
        )
    if rollout.rollout_top_p < 1 or rollout.rollout_top_k != -1:
        raise FlagError(
            "--use-score-centering",
            "be used with --rollout-top-p 1 and --rollout-top-k -1",
            f"{rollout.rollout_top_p} and {rollout.rollout_top_k}",
            "its terms are over the whole vocabulary",
        )
    others = {
        "--use-opsm": off_policy.use_opsm,
        "--use-rs": off_policy.use_rs,
        f"--tis-level {off_policy.tis_level}": off_policy.use_tis and off_policy.tis_level != "token",
        "--custom-tis-function-path": off_policy.custom_tis_function_path,
        "--custom-pg-loss-reducer-function-path": c.algorithm.custom_pg_loss_reducer_function_path,
        f"--opd-loss-type {c.distillation.opd_loss_type}": c.distillation.opd_loss_type != "reverse_kl",
    }
    if flag := next((name for name, on in others.items() if on), None):
        raise FlagError(
            "--use-score-centering",
            f"not be combined with {flag}",
            "both",
            "the weight of every token of the top-k must be known: --use-tis with --tis-mode is",
        )


REINFORCE_LOSS = Surrogate(
    "reinforce",
    "log-prob times advantage: `-A_t log_prob_t`",
    _log_prob,
    source="Williams, 1992",
    aliases=("gpg",),
)
CENTRED = Surrogate(
    "reinforce",
    "the same with centred scores: `-A_t (w_t log_prob_t - c_t)`, see below",
    _centred,
    source="2609.20807",
    reads=frozenset({"rollout_top_ids", "rollout_top_log_probs"}),
    flags=frozenset({"use_tis", "tis_mode", "tis_clip", "tis_clip_low", "score_centering_top_k"}),
    weighs=True,
    flag="--use-score-centering",
    checks=(_whole_distribution,),
)
"""The policy loss that replaces REINFORCE_LOSS with --use-score-centering."""
