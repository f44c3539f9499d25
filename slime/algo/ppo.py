"""Per-token functions of policy-gradient losses, under the names and signatures that existing hooks import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rl_kernel
from slime.algo.advantage import compute_advantages
from slime.algo.distillation import distillation_penalties
from slime.algo.estimators import Response, estimator_for, surrogate_for
from slime.algo.losses import loss_for
from slime.algo.returns import discounted_returns, discounted_sum, gae
from slime.config.schema import Config
from slime.types import TrainData


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    kl_loss_type: str,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """Returns the `kl_loss_type` estimate (k1, k2, k3, low_var_kl) of KL(policy || base) per token, see
    rl_kernel.ratio_kl.

    `importance_ratio` is exp(log_probs - old log-probs). It multiplies the estimate before low_var_kl's clamp, and
    contributes to the gradient.
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
    """Sets `advantages`, `returns` and `kl` in `data`: lists with one tensor [R_i] per sample.

    Reads rewards, masks and the columns that the estimator's record names. --kl-coef also reads old_log_probs and
    ref_log_probs, and --use-opd reads old_log_probs and teacher_log_probs. For a surrogate that chooses tokens, sets
    `chosen_tokens`, too.
    """
    algorithm = c.algorithm
    estimator, hooked = estimator_for(algorithm), algorithm.custom_advantage_function_path is not None
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
    choose = surrogate_for(algorithm).choose
    if choose is not None and loss_for(algorithm).surrogate:
        trained = torch.cat(data["loss_masks"]) != 0
        advantages, old = (torch.cat(data[name])[trained] for name in ("advantages", "old_log_probs"))
        chosen = torch.zeros(len(trained), device=trained.device)
        chosen[trained] = choose(algorithm, advantages, old, _token_keys(data)[trained], dp_group)
        data["chosen_tokens"] = list(chosen.split([len(mask) for mask in data["loss_masks"]]))


def _token_keys(data: TrainData) -> torch.Tensor:
    """Returns a number for each response token, int64 [R]. The number is the same on each rank that may get the
    sample."""
    return torch.cat(
        [
            (index or 0) * 1_000_003 + torch.arange(len(mask), device=mask.device)
            for index, mask in zip(data["sample_indices"], data["loss_masks"], strict=True)
        ]
    )


def calculate_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1
) -> tuple[Tensor, Tensor | None]:
    """Returns log-probs of `tokens` [R] (and entropy) from logits [R, V_local] that are split over `tp_group`, see
    rl_kernel.logp.

    `chunk_size` has no effect. Existing callers pass it to bound memory.
    """
    size = torch.distributed.get_world_size(tp_group) if tp_group is not None else 1
    start = torch.distributed.get_rank(tp_group) * logits.shape[-1] if size > 1 else 0
    group = tp_group if size > 1 else None
    out = rl_kernel.logp(logits, tokens, tp_group=group, vocab_start=start, return_entropy=with_entropy)
    return (out, None) if isinstance(out, Tensor) else out


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any) -> Tensor:
    """Returns the log-probs of `tokens`, in the shape of `tokens`, from logits [..., V_local] that are split over the
    group."""
    rows = logits.reshape(-1, logits.shape[-1])
    return calculate_log_probs_and_entropy(rows, tokens.reshape(-1), process_group)[0].reshape(tokens.shape)


def compute_entropy_from_logits(logits: Tensor, process_group: Any) -> Tensor:
    """Returns the entropy of each row of logits [..., V_local] that are split over the group, in nats."""
    rows = logits.reshape(-1, logits.shape[-1])
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    _, entropy = calculate_log_probs_and_entropy(rows, tokens, process_group, with_entropy=True)
    assert entropy is not None, "it was requested"
    return entropy.reshape(logits.shape[:-1])


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns [B, T], see slime.algo.returns.gae."""
    return gae(rewards, values, gamma, lambd)


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Returns the numbers of `vanilla_gae`, which is fast without chunks. `chunk_size` has no effect."""
    return gae(rewards, values, gamma, lambd)


def chunked_discounted_returns(rewards: Tensor, discount: float, chunk_size: int = 128) -> Tensor:
    """Returns `G_t = r_t + discount * G_{t+1}` of rewards [B, T], in the dtype of the rewards, see
    slime.algo.returns.discounted_sum.

    `chunk_size` has no effect, because the sum is fast without chunks.
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
    """Computes the returns [R_i] of --advantage-estimator reinforce_plus_plus for each sample, from reward, KL and
    mask.

    The tensors are whole responses, so the lengths have no effect. Existing callers pass them.
    """
    return [
        discounted_returns(float(reward), mask, k, kl_coef=kl_coef, gamma=gamma)
        for reward, mask, k in zip(rewards, loss_masks, kl, strict=True)
    ]
