"""`grpo_loss`: the clipped policy objective with KL and entropy terms; each token has its own denominator."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rl_kernel.checks import (
    FLOATS,
    INTEGERS,
    MASKS,
    check_constant,
    check_number,
    check_tensor,
    compute_dtype,
    invalid,
)
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.mode import reads_values
from rl_kernel.ops.grpo_loss.reference import Columns, LossTerms, grpo_loss_reference
from rl_kernel.ops.ratio_kl import check_kl_type
from rl_kernel.telemetry import record, timed


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominators: Tensor | float,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    tis_weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k1",
    unbiased_kl: bool = False,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    impl: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the sum of (loss of a token / its denominator) over the counted tokens, and metrics per token.

    With `r = (log_probs - old_log_probs).exp()` and A = advantages,
    `pg = torch.maximum(-r * A, -r.clamp(1 - eps_clip, 1 + eps_clip_high) * A)`; where A < 0 and `eps_clip_c`
    is given `torch.minimum(pg, -eps_clip_c * A)`;
    `loss = ((pg * tis_weights + kl_coef * kl - entropy_coef * entropy) / denominators)[mask != 0].sum()`.

    Args:
        log_probs: [N] nats, any float dtype; computed in float32 (float64 if it is float64).
        old_log_probs, advantages: [N]; constants.
        mask: [N] bool, integer or float; nonzero means counted. The other tokens have no effect, NaN included.
        denominators: number or [N], > 0. For a mean over each sample (or rollout), the sample's mask sum at each of
            its tokens; for a mean over tokens, the mask sum of the batch; for a sum, 1.
        eps_clip, eps_clip_high: clip the ratio to [1 - eps_clip, 1 + eps_clip_high]; high defaults to eps_clip.
        eps_clip_c: bound of the dual clip, > 1.
        tis_weights: [N] importance weights of trainer over engine; constants. 0 removes the policy term.
        ref_log_probs, kl_coef, kl_type, unbiased_kl: the KL term, see `ratio_kl`.
        entropy, entropy_coef: [N] and the coefficient of its bonus; used if entropy_coef != 0.
        impl: names the implementation, "reference" or "triton", for tests and comparisons.

    Returns:
        (loss, metrics). The loss is a float32 scalar, differentiable in `log_probs` and `entropy`. The metrics are
        detached tensors [N]: pg_loss (after tis_weights), pg_clipfrac (1 where the ratio is clipped), ppo_kl
        (old - new), ratio and, with a reference, kl_loss. Tokens that are not counted hold 0 (ratio: 1).

    Raises:
        ValueError: wrong shape, dtype or device, a constant that requires grad, a coefficient out of range or
            without its tensor, a denominator <= 0. On a device, denominators are read in strict mode only. In the
            other modes, a counted token with a denominator <= 0 makes the loss and its own gradient NaN.
        Refused: the mode or `impl` demands the fast implementation and it cannot run.

    Deterministic. Sources: PPO (Schulman et al. 2017), GRPO (Shao et al. 2024), clip-higher (DAPO, Yu et al. 2025),
    dual clip (Ye et al. 2020), truncated importance sampling (Yao et al. 2025).
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    terms = LossTerms(eps_clip, high, eps_clip_c, kl_coef, kl_type, unbiased_kl, entropy_coef)
    _check_terms(terms, ref_log_probs, entropy)
    columns = Columns(
        log_probs, old_log_probs, advantages, mask, denominators, tis_weights, ref_log_probs, entropy
    )
    return _run(terms, columns, impl)


def _run(terms: LossTerms, columns: Columns, impl: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    _check_columns(columns)
    log_probs = columns.log_probs
    choice = choose("grpo_loss", log_probs.device, impl, float64_refusal(log_probs))
    record(choice, log_probs.numel())
    with timed("grpo_loss", log_probs.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.grpo_loss.autograd import grpo_loss_triton

            return grpo_loss_triton(terms, columns)
        dtype = compute_dtype(log_probs)
        columns = columns.map(lambda name, value: value != 0 if name == "mask" else value.to(dtype))
        divisor = _as_tensor(columns.denominators, columns.mask, dtype)
        return grpo_loss_reference(terms, replace(columns, denominators=divisor))


def _check_columns(c: Columns) -> None:
    check_tensor("log_probs", c.log_probs, ["N"])
    shape, device = c.log_probs.shape, c.log_probs.device
    check_tensor("mask", c.mask, shape, MASKS, device=device)
    constants = {
        "old_log_probs": c.old_log_probs,
        "advantages": c.advantages,
        "tis_weights": c.tis_weights,
        "ref_log_probs": c.ref_log_probs,
    }
    for name, value in (constants | {"entropy": c.entropy}).items():
        if value is not None:
            check_tensor(name, value, shape, device=device)
    check_constant(mask=c.mask, **constants)
    _check_denominators(c.denominators, shape, device)


def _check_terms(terms: LossTerms, ref_log_probs: Tensor | None, entropy: Tensor | None) -> None:
    check_number("eps_clip", terms.eps_clip, at_least=0.0)
    check_number("eps_clip_high", terms.eps_clip_high, at_least=0.0)
    if terms.eps_clip_c is not None:
        check_number("eps_clip_c", terms.eps_clip_c, above=1.0)
    check_number("kl_coef", terms.kl_coef)
    check_number("entropy_coef", terms.entropy_coef)
    check_kl_type(terms.kl_type)
    if terms.kl_coef != 0 and ref_log_probs is None:
        raise invalid("kl_coef", "be 0 without ref_log_probs", terms.kl_coef, "pass ref_log_probs")
    if terms.entropy_coef != 0 and entropy is None:
        raise invalid("entropy_coef", "be 0 without entropy", terms.entropy_coef, "pass entropy")


def _check_denominators(denominators: Tensor | float, shape: torch.Size, device: torch.device) -> None:
    if not isinstance(denominators, Tensor):
        check_number("denominators", denominators, above=0.0)
        return
    check_tensor("denominators", denominators, shape, (*INTEGERS, *FLOATS), device=device)
    check_constant(denominators=denominators)
    if not reads_values(denominators):
        return
    bad = ~(denominators > 0)
    if bad.any():
        row = int(bad.nonzero()[0])
        got = f"{denominators[row].item()} for token {row}"
        raise invalid("denominators", "be > 0 for every token", got, "clamp mask sums to at least 1")


def _as_tensor(denominators: Tensor | float, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns denominators for the reference. A denominator that was not checked and is not positive becomes NaN, or 1
    for a token that is not counted."""
    if not isinstance(denominators, Tensor):
        return torch.full((), denominators, dtype=dtype, device=mask.device)
    instead = torch.where(mask, torch.full((), float("nan"), dtype=dtype, device=mask.device), 1.0)
    return torch.where(denominators > 0, denominators, instead)
