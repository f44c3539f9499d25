"""The loss from the log-probs of a micro-batch, for every estimator. Pure functions of tensors: no model, no ranks.

The micro-batch has R response tokens. The loss of token t is divided by `denominators[t]`, which contains the means
over the sample and over the batch. Losses and metrics of micro-batches and ranks are therefore added.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

import rl_kernel
from slime.algo.corrections import accepted, importance_weights
from slime.algo.distillation import distillation_term
from slime.algo.estimators import surrogate_for
from slime.algo.importance import compute_ratio, opsm_mask, sequence_mean, weighted
from slime.algo.token_columns import HookView, Losses, TokenColumns
from slime.config.schema import Config
from slime.config.sections.off_policy import OffPolicyConfig
from slime.hooks import load_function


def sft_loss(t: TokenColumns) -> Losses:
    """Returns the loss `-(mask / denominators * log_probs).sum()`."""
    loss = -t.mean(t.log_probs)
    return loss, {"loss": loss.detach()}, {}


def policy_loss(c: Config, t: TokenColumns) -> Losses:
    """Returns `(mask / denominators * (pg - entropy_coef * entropy + kl_loss_coef * kl + opd_loss_coef * d)).sum()`,
    with pg by --pg-loss-type and d by --opd-loss-type.

    The surrogate's record (`slime.algo.surrogates`) has the function for pg and the level of the ratio. pg is
    multiplied by the importance weight of --use-tis, by 0 for each token that --use-rs drops, and by 0 for each sample
    that --use-opsm drops. The entropy has a gradient only if its coefficient is not 0.
    """
    t, algorithm = t.mask_untrained(), c.algorithm
    old, rollout = t.old_log_probs, t.get("rollout_log_probs")
    factor, per_token = pg_factor(c.off_policy, t, old)
    pg_loss, terms = compute_pg_loss(c, t, old, factor)
    assert t.entropy is not None, "every head computes it for a loss that reads it"
    entropy_loss = t.mean(t.entropy)
    sums = {"pg_loss": pg_loss, "entropy_loss": entropy_loss}
    loss = pg_loss
    if algorithm.entropy_coef != 0:
        loss = loss - algorithm.entropy_coef * entropy_loss
    if algorithm.use_kl_loss:
        _, kl = rl_kernel.ratio_kl(
            t.log_probs,
            old,
            t["ref_log_probs"],
            t.mask,
            algorithm.kl_loss_type,
            unbiased=algorithm.use_unbiased_kl,
        )
        sums["kl_loss"] = t.mean(kl)
        loss = loss + algorithm.kl_loss_coef * sums["kl_loss"]
    if (divergence := distillation_term(c.distillation, t)) is not None:
        sums["opd_loss"] = t.mean(divergence)
        loss = loss + c.distillation.opd_loss_coef * sums["opd_loss"]
    per_token |= {**terms, "log_probs": t.log_probs}
    maxima = {}
    if rollout is not None:
        # With --use-rollout-logprobs, old is the engine's own: compare with the present policy instead.
        trainer_side = t.log_probs.detach() if c.off_policy.use_rollout_logprobs else old
        difference = (trainer_side - rollout).abs()
        per_token["train_rollout_logprob_abs_diff"] = difference
        # pad: a context-parallel rank may have no token of the micro-batch, and max() of nothing is an error
        maxima["train_rollout_logprob_abs_diff_max"] = pad(difference * t.mask, (0, 1)).max()
    sums |= {name: t.mean(value) for name, value in per_token.items()}
    return loss, {"loss": loss, **sums}, maxima


def pg_factor(
    off_policy: OffPolicyConfig, t: TokenColumns, old: Tensor
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Returns the constant factor for each token's policy-gradient term ([R], or None for 1), and the factor's
    metrics."""
    factor, metrics = None, {}
    if off_policy.use_opsm:
        seq_kl = sequence_mean(old - t.log_probs.detach(), t.mask, t.sample_of_row, len(t.response_lengths))
        factor, metrics["opsm_clipfrac"] = opsm_mask(
            t["advantages"], seq_kl, t.sample_of_row, delta=off_policy.opsm_delta
        )
    if off_policy.use_tis or off_policy.get_mismatch_metrics:
        metrics["ois"] = compute_ratio(t.log_probs.detach() - old)
        if not off_policy.custom_tis_function_path:
            weights, extra = importance_weights(off_policy, t, old)
            metrics |= extra
            if off_policy.use_tis:
                factor = weights if factor is None else factor * weights
    if off_policy.use_rs and not off_policy.custom_tis_function_path:
        keep, extra = accepted(off_policy, t, old)
        factor, metrics = keep if factor is None else factor * keep, metrics | extra
    return factor, metrics


def compute_pg_loss(
    c: Config, t: TokenColumns, old: Tensor, factor: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the sum of the policy-gradient terms, and metrics per token (pg_clipfrac, ppo_kl and metrics of
    hooks)."""
    algorithm, new, base = c.algorithm, t.log_probs, old
    surrogate = surrogate_for(algorithm)
    if surrogate.ratio != "token":
        log_ratio = sequence_mean(new - old, t.mask, t.sample_of_row, len(t.response_lengths))[
            t.sample_of_row
        ]
        if surrogate.ratio == "sequence_token":
            log_ratio = log_ratio.detach() + (new - new.detach())
        new, base = log_ratio, torch.zeros_like(old)
    hooked = c.off_policy.custom_tis_function_path or algorithm.custom_pg_loss_reducer_function_path
    if surrogate.fused and not hooked:
        loss, terms = rl_kernel.grpo_loss(
            new,
            base,
            t["advantages"],
            t.mask,
            t.denominators,
            eps_clip=algorithm.eps_clip,
            eps_clip_high=algorithm.eps_clip_high,
            eps_clip_c=algorithm.eps_clip_c,
            tis_weights=factor,
        )
        return loss, {name: terms[name] for name in ("pg_clipfrac", "ppo_kl")}
    ppo_kl = base - new
    pg, clipped = surrogate.per_token(c, t, new, ppo_kl)
    if factor is not None and not surrogate.weighs:
        pg = pg * factor
    if not hooked:  # `t` may be a block of tokens, which hooks never see
        return t.mean(pg), {"pg_clipfrac": clipped, "ppo_kl": ppo_kl}
    loss, extra = reduce_with_hooks(c, t, pg, old)
    return loss, {"pg_clipfrac": clipped, "ppo_kl": ppo_kl, **extra}


def reduce_with_hooks(
    c: Config, t: TokenColumns, pg: Tensor, old: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Reduces the losses of the tokens with --custom-tis-function-path and --custom-pg-loss-reducer-function-path.

    Hooks get the tokens of `t.view` and whole masks. The first hook may return masks, which set terms of the sum to 0
    and leave the denominators as they are. The second hook is fn(total_lengths, response_lengths, loss_masks,
    calculate_per_token_loss) -> callable(pg) -> sum of sample means.
    """
    off_policy, view = c.off_policy, t.view or HookView(t.response_lengths)
    masks, metrics = t.per_sample(t.mask), {}
    pg = view.local(pg)
    if off_policy.custom_tis_function_path and (off_policy.use_tis or off_policy.get_mismatch_metrics):
        hook = load_function(off_policy.custom_tis_function_path, flag="--custom-tis-function-path")
        corrected, new_masks, found = hook(
            args=view.args or c.namespace(),
            pg_loss=pg,
            train_log_probs=view.split(old),
            rollout_log_probs=view.split(t["rollout_log_probs"]),
            loss_masks=masks,
            total_lengths=t.total_lengths,
            response_lengths=t.response_lengths,
        )
        metrics = {name: _per_token(name, value, view) for name, value in found.items()}
        if off_policy.use_tis:
            _check_corrected(corrected, list(new_masks), pg, masks)
            pg, masks = corrected, list(new_masks)
    path = c.algorithm.custom_pg_loss_reducer_function_path
    if path is None:
        return weighted(view.whole(pg), torch.cat(masks) / t.denominators).sum(), metrics
    make = load_function(path, flag="--custom-pg-loss-reducer-function-path")
    reducer = make(t.total_lengths, t.response_lengths, masks, c.algorithm.calculate_per_token_loss)
    return view.total(reducer(pg)) / t.normaliser, metrics


def _per_token(name: str, value: object, view: HookView) -> Tensor:
    """Returns a metric of a hook as [R], from [r] or a list of [r_i]. A single number stays a single number."""
    column = torch.cat(list(value)) if isinstance(value, list | tuple) else torch.as_tensor(value)
    if column.ndim == 0:
        return column
    if len(column) != sum(view.lengths):
        raise ValueError(
            f"--custom-tis-function-path must return metrics with one value per token of pg_loss, got {len(column)} "
            f"for {sum(view.lengths)} in {name}; return a tensor of one number for a mean"
        )
    return view.whole(column.detach().float())


def _check_corrected(pg: Tensor, masks: list[Tensor], old_pg: Tensor, old_masks: list[Tensor]) -> None:
    got = [tuple(pg.shape), *(tuple(mask.shape) for mask in masks)]
    want = [tuple(old_pg.shape), *(tuple(mask.shape) for mask in old_masks)]
    if got != want:
        raise ValueError(
            f"--custom-tis-function-path must return pg_loss and loss_masks of the shapes that it got, got {got} for "
            f"{want}; masks stay whole under context parallelism"
        )
