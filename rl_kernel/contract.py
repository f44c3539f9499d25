"""The numeric contract of each operator, as data that tests, audits and docs read.

An error is the distance from the operator's formula, computed in float64 from the same inputs (already rounded to their
dtype).
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
        """Returns the permitted error against `truth`, a tensor of any shape, which may be empty."""
        largest = truth.abs().max().item() if truth.numel() else 0.0
        return self.absolute + self.relative * largest


@dataclass(frozen=True)
class Contract:
    """The contract of an operator.

    `outputs`: tolerance per dtype of the inputs. For linear operators the dtype is the one that logits are rounded to.
    `gradients`: tolerance per dtype of the input. For linear operators it is the larger tolerance of input and logits.
    `differentiable`: the inputs with a gradient. `deterministic`: the same inputs give the same bits.
    `parallel`: the kinds of process groups that the operator can work over.
    """

    outputs: Mapping[str, Tolerance]
    gradients: Mapping[str, Tolerance]
    differentiable: tuple[str, ...]
    deterministic: bool
    parallel: tuple[str, ...] = ()


def _all_dtypes(tolerance: Tolerance) -> dict[str, Tolerance]:
    """Returns `tolerance` for each dtype, for operators that first convert their inputs to float32."""
    return dict.fromkeys(("float32", "bfloat16", "float16"), tolerance)


_GRADIENTS = {
    # The largest error comes from the rounding to the input's dtype: 2**-8 and 2**-11 of the value.
    "float32": Tolerance(1e-7, 2e-5),
    "bfloat16": Tolerance(1e-7, 2**-8),
    "float16": Tolerance(1e-7, 2**-11),
}
# The error of the difference of two logits, each wrong by half a unit in the last place, divided by the temperature t.
# The bound is valid for logits below 8 with t >= 1, and for logits below 4 with t >= 0.5.
_LINEAR_LOGP = {
    "float32": Tolerance(3e-5, 1e-6),
    "bfloat16": Tolerance(3.2e-2, 0.0),
    "float16": Tolerance(4e-3, 0.0),
}
_LINEAR_GRADIENTS = {
    # All steps are in float32: exponentials of base 2, and sums with one term per column.
    "float32": Tolerance(1e-7, 2e-5),
    # Unit roundoff u = 2**-8 (float16: 2**-11). Three values are rounded: the tile of d_logits, the rows of hidden
    # times the factor of their row, and the result. That makes 3 u of the value. Rounded logits (the default) change
    # each probability by 2**-6 (2**-9), as in the outputs. The sum is less than 2**-5 (2**-8) of the largest gradient.
    "bfloat16": Tolerance(1e-7, 2**-5),
    "float16": Tolerance(1e-7, 2**-8),
}

_LAYER = ("hidden", "weight", "bias")
_DATA = ("data", "context")

# PyTorch computes and rounds in the dtype of x, with unit roundoff u: first silu, then the product with the other half.
# Both factors of a gradient are rounded likewise. That makes 2 u. In float32, the exponential and the division add
# errors. In the gradient, 1 - sigmoid is wrong by up to 2 * 2**-24, times gates of up to 17; above 17, 1 - sigmoid is 0
# in float32.
_SWIGLU = {
    "float32": Tolerance(1e-7, 1e-6),
    "bfloat16": Tolerance(1e-7, 2 * 2**-8),
    "float16": Tolerance(1e-7, 2 * 2**-11),
}
_SWIGLU_GRADIENTS = _SWIGLU | {"float32": Tolerance(1e-7, 4e-6)}
# A rotation rounds two products and their sum. A rotation keeps lengths, so that the products are at most sqrt(2) times
# the largest result: (1 + sqrt(2)) u.
_ROTARY = {
    "float32": Tolerance(1e-7, 2.5 * 2**-24),
    "bfloat16": Tolerance(1e-7, 2.5 * 2**-8),
    "float16": Tolerance(1e-7, 2.5 * 2**-11),
}

# The sums over the experts of a token are in float32 and are rounded once. Values of both signs may cancel, so the
# bound permits terms that are larger than the largest sum: twice the unit roundoff.
_ROW_SUMS = {
    "float32": Tolerance(1e-7, 1e-6),
    "bfloat16": Tolerance(1e-7, 2**-7),
    "float16": Tolerance(1e-7, 2**-10),
}

CONTRACTS: Mapping[str, Contract] = {
    "linear_logp": Contract(_LINEAR_LOGP, _LINEAR_GRADIENTS, _LAYER, True, ("vocabulary",)),
    "linear_top": Contract(_LINEAR_LOGP, {}, (), True, ("vocabulary",)),
    "linear_token_loss": Contract(_LINEAR_LOGP, _LINEAR_GRADIENTS, _LAYER, True, ("vocabulary",)),
    "logp": Contract(_all_dtypes(Tolerance(5e-6, 1e-6)), _GRADIENTS, ("logits",), True, ("vocabulary",)),
    "ratio_kl": Contract(_all_dtypes(Tolerance(1e-6, 5e-6)), _GRADIENTS, ("log_probs",), True),
    "grpo_loss": Contract(_all_dtypes(Tolerance(1e-5, 1e-5)), _GRADIENTS, ("log_probs", "entropy"), True),
    "swiglu": Contract(_SWIGLU, _SWIGLU_GRADIENTS, ("x", "weights"), True),
    "expert_dispatch": Contract(_all_dtypes(Tolerance(0.0, 0.0)), _ROW_SUMS, ("x", "weights"), True),
    "expert_combine": Contract(_ROW_SUMS, _all_dtypes(Tolerance(0.0, 0.0)), ("y",), True),
    "rotary": Contract(_ROTARY, _ROTARY, ("x",), True),
    "group_advantage": Contract(_all_dtypes(Tolerance(1e-7, 1e-6)), {}, (), True),
    "masked_sum": Contract(_all_dtypes(Tolerance(0.0, 1e-7)), _GRADIENTS, ("values",), True, _DATA),
    "masked_mean": Contract(_all_dtypes(Tolerance(0.0, 1e-7)), _GRADIENTS, ("values",), True, _DATA),
    "masked_whiten": Contract(_all_dtypes(Tolerance(1e-7, 1e-6)), _GRADIENTS, ("values",), True, _DATA),
}

TRAIN_ROLLOUT: Mapping[str, Tolerance] = {
    # The largest |log-prob of the trainer - log-prob of the engine| of a token, in nats, per dtype of both models.
    # This is not the contract of an operator. It assumes the same weights, tokens and temperature t, the full softmax,
    # and |logit| / t < 16 in 16 bits, < 32 in float32.
    # float32 (u = 2**-24): sums over layers and columns in another order differ by up to 64 u of a logit, and a
    # log-prob is a difference of two logits: 2 * 32 * 2**-18 = 2**-12. The largest difference measured on a CPU is
    # 4.0e-5, a sixth of the bound.
    "float32": Tolerance(2**-12, 0.0),
    # bfloat16 (u = 2**-8): rounding moves a logit in [8, 16) by up to 2**-5. Target and log-sum-exp on both sides make
    # 4 * 2**-5. The layers round too, and the final hidden state may differ by the same amount again. The largest
    # difference measured on H200s is 0.218, with a Qwen3-4B of random weights (docs/audit.md). More layers or larger
    # logits may need a larger tolerance.
    "bfloat16": Tolerance(2**-2, 0.0),
    # float16 (u = 2**-11): an eighth of the bound of bfloat16.
    "float16": Tolerance(2**-5, 0.0),
}


def max_error(actual: Tensor, truth: Tensor) -> float:
    """Returns the largest absolute difference, computed in float64, or 0 for empty tensors. A NaN counts as
    infinity."""
    if truth.numel() == 0:
        return 0.0
    difference = (actual.double() - truth.double()).abs().max()
    return float("inf") if torch.isnan(difference) else difference.item()


def contract_id(operator: str) -> str:
    """Returns name and version of a contract, such as "logp/1a2b3c4d". The version changes when any field of the
    contract changes."""
    promise = repr(asdict(CONTRACTS[operator]))
    return f"{operator}/{hashlib.sha256(promise.encode()).hexdigest()[:8]}"
