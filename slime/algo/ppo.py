"""Per-token pieces of policy-gradient losses under the names and signatures that existing hooks import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rl_kernel
from slime.algo.advantage import compute_advantages
from slime.algo.distillation import distillation_penalties
from slime.algo.estimators import Response, estimator_of, surrogate_of
from slime.algo.losses import loss_of
from slime.algo.returns import discounted_returns, discounted_sum, gae
from slime.config.schema import Config
from slime.types import TrainData


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    kl_loss_type: str,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """The `kl_loss_type` estimate (k1, k2, k3, low_var_kl) of KL(policy || base) per token; see rl_kernel.ratio_kl.

    `importance_ratio`, exp(log_probs - old log-probs), multiplies it (before low_var_kl's clamp), with its gradient.
    """
    if importance_ratio is None:
        return rl_kernel.ratio_kl(
            log_probs, log_probs_base.detach(), log_probs_base.detach(), None, kl_loss_type
        )[1]
    old = (log_probs - importance_ratio.log()).detach()
    return rl_kernel.ratio_kl(log_probs, old, log_probs_base.detach(), None, kl_loss_type, unbiased=True)[1]


def compute_advantages_and_returns(
    c: Config, data: TrainData, *, dp_group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Set `advantages`, `returns` and `kl` of `data`: lists with one tensor [R_i] per sample. Reads rewards and masks,
    with --kl-coef old_log_probs and ref_log_probs, with --use-opd old_log_probs and teacher_log_probs, and the columns
    that the estimator's record names. A surrogate that treats some tokens apart gets `chosen_tokens`, too."""
    algorithm = c.algorithm
    estimator, hooked = estimator_of(algorithm), algorithm.custom_advantage_function_path is not None
    if algorithm.kl_coef != 0 and (hooked or "kl_coef" in estimator.flags):
        old, ref, mask = (torch.cat(data[name]) for name in ("old_log_probs", "ref_log_probs", "loss_masks"))
        _, kl = rl_kernel.ratio_kl(old, ref, ref, mask, algorithm.kl_loss_type)
        data["kl"] = list(kl.split([len(x) for x in data["old_log_probs"]]))
    else:
        data["kl"] = [torch.zeros_like(mask, dtype=torch.float32) for mask in data["loss_masks"]]
    read = [name for name in sorted(estimator.reads) if name in data]
    responses = [
        Response(reward, mask, kl, {name: torch.as_tensor(data[name][i]) for name in read})
        for i, (reward, mask, kl) in enumerate(
            zip(data["rewards"], data["loss_masks"], data["kl"], strict=True)
        )
    ]
    penalties = distillation_penalties(c.distillation, data)
    data["advantages"], data["returns"] = compute_advantages(
        c, responses, penalties=penalties, dp_group=dp_group
    )
    choose = surrogate_of(algorithm).choose
    if choose is not None and loss_of(algorithm).surrogate:
        trained = torch.cat(data["loss_masks"]) != 0
        advantages, old = (torch.cat(data[name])[trained] for name in ("advantages", "old_log_probs"))
        chosen = torch.zeros(len(trained), device=trained.device)
        chosen[trained] = choose(algorithm, advantages, old, _token_keys(data)[trained], dp_group)
        data["chosen_tokens"] = list(chosen.split([len(mask) for mask in data["loss_masks"]]))


def _token_keys(data: TrainData) -> torch.Tensor:
    """A number for each response token that is the same wherever the sample is trained, int64 [R]."""
    return torch.cat(
        [
            (index or 0) * 1_000_003 + torch.arange(len(mask), device=mask.device)
            for index, mask in zip(data["sample_indices"], data["loss_masks"], strict=True)
        ]
    )


def calculate_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `tokens` [R] (and entropy) from logits [R, V_local] split over `tp_group`; see rl_kernel.logp.

    `chunk_size` is kept for callers that bounded memory with it.
    """
    size = torch.distributed.get_world_size(tp_group) if tp_group is not None else 1
    start = torch.distributed.get_rank(tp_group) * logits.shape[-1] if size > 1 else 0
    group = tp_group if size > 1 else None
    out = rl_kernel.logp(logits, tokens, tp_group=group, vocab_start=start, return_entropy=with_entropy)
    return (out, None) if isinstance(out, Tensor) else out


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T]; see slime.algo.returns.gae."""
    return gae(rewards, values, gamma, lambd)


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """The same numbers as `vanilla_gae`, which needs no chunks to be fast; `chunk_size` is kept for its callers."""
    return gae(rewards, values, gamma, lambd)


def chunked_discounted_returns(rewards: Tensor, discount: float, chunk_size: int = 128) -> Tensor:
    """`G_t = r_t + discount * G_{t+1}` of rewards [B, T], in their dtype; see slime.algo.returns.discounted_sum.

    `chunk_size` is kept for callers; the sum needs no chunks to be fast.
    """
    return discounted_sum(rewards, discount).to(rewards.dtype)


def get_reinforce_plus_plus_returns(
    rewards: Tensor,
    kl: list[Tensor],
    loss_masks: list[Tensor],
    response_lengths: list[int],
    total_lengths: list[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """The returns [R_i] of --advantage-estimator reinforce_plus_plus for each sample, from its reward, KL and mask.

    The tensors are whole responses, so the lengths are kept for callers only.
    """
    return [
        discounted_returns(float(reward), mask, k, kl_coef=kl_coef, gamma=gamma)
        for reward, mask, k in zip(rewards, loss_masks, kl, strict=True)
    ]
