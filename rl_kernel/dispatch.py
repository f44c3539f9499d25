"""Chooses the implementation that runs a call, with the reason, and lists all implementations in `capabilities()`.

An operator passes in the reasons that depend on its arguments (a dtype, a layout), as one sentence.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass
from functools import cache
from typing import NoReturn

import torch

from rl_kernel.checks import dtype_name, invalid
from rl_kernel.contract import CONTRACTS
from rl_kernel.mode import check_operator, settings

IMPLEMENTATIONS = ("reference", "triton")
HOST_OPERATORS = frozenset({"group_advantage", "masked_sum", "masked_mean", "masked_whiten"})
"""Operators for tensors on the host, where rewards are. On the host their reference does not count as a fallback."""


class Refused(ValueError):
    """Raised if strict mode or `impl` demands the fast implementation and it cannot run."""


@dataclass(frozen=True)
class Choice:
    """The implementation that runs a call. `reason` explains why it is not the fast implementation, and is empty if it
    is. `fallback` is True if the mode requested the fast implementation and the reference runs."""

    operator: str
    implementation: str
    reason: str = ""
    fallback: bool = False


def choose(
    operator: str, device: torch.device, impl: str | None = None, refusal: str | None = None
) -> Choice:
    """Returns the implementation of a call on tensors of `device`.

    `impl` names the implementation and overrides the mode (for tests and comparisons). `refusal` is the operator's
    reason why its fast implementation cannot take these arguments; None if it can.

    Raises:
        Refused: strict mode or `impl` demands the fast implementation, and it cannot run.
        ValueError: unknown operator or implementation.
    """
    check_operator(operator)
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise invalid(
            "impl",
            f"be one of {', '.join(IMPLEMENTATIONS)}",
            repr(impl),
            "leave it out to let the mode choose",
        )
    if impl == "reference":
        return Choice(operator, "reference", "impl='reference' was asked for")
    reason = machine_refusal(device.type) or refusal
    if impl == "triton":
        # Triton's interpreter runs kernels on host tensors. Tests select the interpreter explicitly; no mode selects
        # it.
        demanded = refusal if interpreted() else reason
        if demanded is not None:
            _refuse(operator, demanded)
        return Choice(operator, "triton")
    if settings().mode == "off":
        return Choice(operator, "reference", "the mode is off")
    if operator not in settings().operators:
        return Choice(operator, "reference", "the operator is not in the configured list")
    if device.type == "cpu" and operator in HOST_OPERATORS:
        return Choice(operator, "reference", "host tensors")
    if reason is None:
        return Choice(operator, "triton")
    if settings().mode == "strict":
        _refuse(operator, reason)
    return Choice(operator, "reference", reason, fallback=True)


def _refuse(operator: str, reason: str) -> NoReturn:
    raise Refused(
        f"{operator} must run its Triton implementation, but {reason}; pass inputs it takes or use mode 'auto'"
    )


@cache
def machine_refusal(device_type: str) -> str | None:
    """Returns the reason why Triton kernels cannot run on tensors of this device type, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type != "cuda":
        return f"the tensors are on {device_type} and the kernels need a CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU has compute capability {major}.{minor} and the kernels need 8.0"
    return None


def interpreted() -> bool:
    """Returns whether Triton's interpreter is on (TRITON_INTERPRET=1). The interpreter runs kernels on the host,
    slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def float64_refusal(*tensors: torch.Tensor | None) -> str | None:
    """Returns the reason why the kernels, which compute in float32, cannot take float64 inputs, or None if no input is
    float64."""
    doubles = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return "float64 inputs are computed by the reference only" if doubles else None


def capabilities() -> dict[str, dict[str, object]]:
    """Returns per operator: implementations, dtypes, hardware, parallel modes, determinism and tolerances, as plain
    data.

    `here` is "triton", or the reason why Triton kernels cannot run on this machine.
    """
    table = {}
    for name, contract in CONTRACTS.items():
        table[name] = {
            "implementations": list(IMPLEMENTATIONS),
            "dtypes": {
                "reference": ["float32", "bfloat16", "float16", "float64"],
                "triton": [dtype_name(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
            },
            "hardware": {"reference": "any", "triton": "CUDA, compute capability 8.0 or newer"},
            "parallel": list(contract.parallel),
            "deterministic": contract.deterministic,
            "differentiable": list(contract.differentiable),
            "outputs": {dtype: asdict(tolerance) for dtype, tolerance in contract.outputs.items()},
            "gradients": {dtype: asdict(tolerance) for dtype, tolerance in contract.gradients.items()},
            "here": machine_refusal("cuda" if torch.cuda.is_available() else "cpu") or "triton",
        }
    return table
