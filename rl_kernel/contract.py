"""What each operator promises about its numbers, as data: the single source for tests, audits and docs.

The truth is the operator's formula evaluated in float64 on the same inputs, as rounded to their dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Largest permitted error: `absolute + relative * truth.abs().max()`."""

    absolute: float
    relative: float

    def bound(self, truth: Tensor) -> float:
        """The permitted error against `truth` (any shape, may be empty)."""
        largest = truth.abs().max().item() if truth.numel() else 0.0
        return self.absolute + self.relative * largest


@dataclass(frozen=True)
class Contract:
    """`outputs` by dtype of the inputs (linear operators: by the dtype that logits are rounded to); `gradients` by
    dtype of the input (linear operators: of the input or of the logits, whichever is coarser).

    `differentiable` names the inputs with a gradient. `deterministic`: the same inputs give the same bits.
    `parallel`: over which groups of processes the operator works.
    """

    outputs: Mapping[str, Tolerance]
    gradients: Mapping[str, Tolerance]
    differentiable: tuple[str, ...]
    deterministic: bool
    parallel: tuple[str, ...] = ()


def _all_dtypes(tolerance: Tolerance) -> dict[str, Tolerance]:
    """For operators that widen their inputs to float32 first: the dtype does not matter."""
    return dict.fromkeys(("float32", "bfloat16", "float16"), tolerance)


_GRADIENTS = {
    # One rounding to the input's dtype dominates: 2**-8 and 2**-11 of the value.
    "float32": Tolerance(1e-7, 2e-5),
    "bfloat16": Tolerance(1e-7, 2**-8),
    "float16": Tolerance(1e-7, 2**-11),
}
# Two logits, each off by half a unit in the last place, divided by the temperature: for logits below 8 and t >= 1, or
# below 4 and t >= 0.5.
_LINEAR_LOGP = {
    "float32": Tolerance(3e-5, 1e-6),
    "bfloat16": Tolerance(3.2e-2, 0.0),
    "float16": Tolerance(4e-3, 0.0),
}
_LINEAR_GRADIENTS = {
    # float32 throughout; exponents of base 2 and sums of one term for each column.
    "float32": Tolerance(1e-7, 2e-5),
    # Unit roundoff u = 2**-8 (float16: 2**-11). The tile of d_logits, the rows of hidden that carry the factor of their
    # row, and the result are rounded to it: 3 u of the value. Logits rounded on the way (the default) move each
    # probability by 2**-6 (2**-9), as in the outputs: together less than 2**-5 (2**-8) of the largest gradient.
    "bfloat16": Tolerance(1e-7, 2**-5),
    "float16": Tolerance(1e-7, 2**-8),
}

_LAYER = ("hidden", "weight", "bias")
_DATA = ("data", "context")

# Computed and rounded in the dtype of x, of unit roundoff u. PyTorch rounds silu and then its product with what it
# gates, and so both factors of a gradient: 2 u. In float32 the exponential and the division count, and in the gradient
# 1 - sigmoid, off by up to two units of 2**-24, times gates of up to 17, above which it is 0 in float32.
_SWIGLU = {
    "float32": Tolerance(1e-7, 1e-6),
    "bfloat16": Tolerance(1e-7, 2 * 2**-8),
    "float16": Tolerance(1e-7, 2 * 2**-11),
}
_SWIGLU_GRADIENTS = _SWIGLU | {"float32": Tolerance(1e-7, 4e-6)}
# Both products of a rotation and their sum are rounded: the products to u of at most sqrt(2) times the largest result,
# as a rotation keeps lengths; (1 + sqrt(2)) u.
_ROTARY = {
    "float32": Tolerance(1e-7, 2.5 * 2**-24),
    "bfloat16": Tolerance(1e-7, 2.5 * 2**-8),
    "float16": Tolerance(1e-7, 2.5 * 2**-11),
}

CONTRACTS: Mapping[str, Contract] = {
    "linear_logp": Contract(_LINEAR_LOGP, _LINEAR_GRADIENTS, _LAYER, True, ("vocabulary",)),
    "linear_token_loss": Contract(_LINEAR_LOGP, _LINEAR_GRADIENTS, _LAYER, True, ("vocabulary",)),
    "logp": Contract(_all_dtypes(Tolerance(5e-6, 1e-6)), _GRADIENTS, ("logits",), True, ("vocabulary",)),
    "ratio_kl": Contract(_all_dtypes(Tolerance(1e-6, 5e-6)), _GRADIENTS, ("log_probs",), True),
    "grpo_loss": Contract(_all_dtypes(Tolerance(1e-5, 1e-5)), _GRADIENTS, ("log_probs", "entropy"), True),
    "swiglu": Contract(_SWIGLU, _SWIGLU_GRADIENTS, ("x",), True),
    "rotary": Contract(_ROTARY, _ROTARY, ("x",), True),
    "group_advantage": Contract(_all_dtypes(Tolerance(1e-7, 1e-6)), {}, (), True),
    "masked_sum": Contract(_all_dtypes(Tolerance(0.0, 1e-7)), _GRADIENTS, ("values",), True, _DATA),
    "masked_mean": Contract(_all_dtypes(Tolerance(0.0, 1e-7)), _GRADIENTS, ("values",), True, _DATA),
    "masked_whiten": Contract(_all_dtypes(Tolerance(1e-7, 1e-6)), _GRADIENTS, ("values",), True, _DATA),
}

TRAIN_ROLLOUT: Mapping[str, Tolerance] = {
    # Largest |trainer's - engine's log-prob| of a token, nats, by the dtype of both models; no operator's promise.
    # Assumes the same weights, tokens and temperature t, full softmax, |logit| / t < 16 in 16 bits, < 32 in float32.
    # float32 (u = 2**-24): sums over layers and columns in another order differ by up to 64 u of a logit, and a
    # log-prob is a difference of two: 2 * 32 * 2**-18 = 2**-12. Largest difference measured on CPU: 4.0e-5, a sixth.
    "float32": Tolerance(2**-12, 0.0),
    # bfloat16 (u = 2**-8): a logit in [8, 16) is rounded by up to 2**-5; target and log-sum-exp, on both sides, make
    # 4 * 2**-5. The final hidden state, after layers with roundings of their own, may differ by as much again. Largest
    # difference measured on H200s: 0.218, of a Qwen3-4B with random weights (docs/audit.md); more layers or larger
    # logits may need more.
    "bfloat16": Tolerance(2**-2, 0.0),
    # float16 (u = 2**-11): an eighth.
    "float16": Tolerance(2**-5, 0.0),
}


def max_error(actual: Tensor, truth: Tensor) -> float:
    """Largest absolute difference, in float64; 0 for empty tensors. A NaN is an infinite error."""
    if truth.numel() == 0:
        return 0.0
    difference = (actual.double() - truth.double()).abs().max()
    return float("inf") if torch.isnan(difference) else difference.item()


def contract_id(operator: str) -> str:
    """Name and version of a contract, "logp/1a2b3c4d": it changes when a promise does."""
    promise = repr(asdict(CONTRACTS[operator]))
    return f"{operator}/{hashlib.sha256(promise.encode()).hexdigest()[:8]}"
