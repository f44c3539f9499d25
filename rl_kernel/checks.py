"""Checks of inputs that several operators share, and the form of their errors.

Every error is a ValueError with the text "<name> must <rule>, got <value>; <what to do>".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of real-valued inputs. float64 is for derivative checks: operators compute and return it in float64."""
INTEGERS = (torch.int64, torch.int32)
MASKS = (torch.bool, torch.uint8, *INTEGERS, *FLOATS)


def invalid(name: str, rule: str, got: object, todo: str) -> ValueError:
    """Returns the ValueError for the caller to raise."""
    return ValueError(f"{name} must {rule}, got {got}; {todo}")


def check_tensor(
    name: str,
    value: Tensor,
    shape: Sequence[int | str] | None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    device: torch.device | None = None,
) -> None:
    """Raises ValueError unless `value` is a tensor of one of `dtypes`, on `device` if `device` is given. `shape` lists
    the sizes: a letter permits any size, and None permits any shape."""
    if not isinstance(value, Tensor):
        raise invalid(name, "be a tensor", type(value).__name__, "convert it with torch.as_tensor")
    if shape is not None and not _fits(value.shape, shape):
        want = "[" + ", ".join(str(size) for size in shape) + "]"
        raise invalid(name, f"have shape {want}", list(value.shape), "pass inputs of the same tokens")
    if value.dtype not in dtypes:
        names = ", ".join(dtype_name(dtype) for dtype in dtypes)
        raise invalid(name, f"be one of {names}", dtype_name(value.dtype), "convert it with .to(dtype)")
    if device is not None and value.device != device:
        raise invalid(name, f"be on {device}", value.device, "move it with .to(device)")


def _fits(actual: torch.Size, shape: Sequence[int | str]) -> bool:
    return len(actual) == len(shape) and all(
        isinstance(want, str) or want == size for want, size in zip(shape, actual, strict=True)
    )


def check_constant(**tensors: Tensor | None) -> None:
    """Raises ValueError if an input that gets no gradient requires a gradient. Without the check, the caller would not
    notice that the gradient is missing."""
    for name, value in tensors.items():
        if value is not None and value.requires_grad:
            raise invalid(name, "not require grad", "requires_grad=True", "pass it through .detach()")


def check_number(
    name: str, value: float, *, above: float | None = None, at_least: float | None = None
) -> None:
    """Raises ValueError unless `value` is finite, greater than `above` and at least `at_least`. A bound of None is not
    checked."""
    bounds = ["be finite"]
    if above is not None:
        bounds.append(f"be > {above:g}")
    if at_least is not None:
        bounds.append(f"be >= {at_least:g}")
    low = (above is not None and value <= above) or (at_least is not None and value < at_least)
    if not math.isfinite(value) or low:
        raise invalid(name, " and ".join(bounds), value, "choose a value in that range")


def check_temperature(temperature: float | Tensor, tokens: int, device: torch.device) -> None:
    """Raises ValueError unless `temperature` is a positive number, or a constant tensor with a positive number per
    token. The check copies the values of a tensor to the host."""
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, above=0.0)
        return
    check_tensor("temperature", temperature, [tokens], device=device)
    check_constant(temperature=temperature)
    bad = ~((temperature > 0) & torch.isfinite(temperature))
    if bad.any():
        row = int(bad.nonzero()[0])
        got = f"{temperature[row].item()} for token {row}"
        raise invalid(
            "temperature", "be finite and be > 0 for every token", got, "give greedy tokens a value of 1"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its prefix: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Returns float64 if an input is float64, otherwise float32."""
    doubles = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if doubles else torch.float32
