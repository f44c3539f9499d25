"""Makes Triton's interpreter round float32 to bfloat16 and float8 as GPUs do, to nearest even. The interpreter itself
truncates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from rl_kernel.dispatch import interpreted


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns the bits of float32 values rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_float8(values: np.ndarray) -> np.ndarray:
    """Returns the codes of float32 values in e4m3, rounded to nearest, ties to even. Values above 448 become 448."""
    limited = torch.from_numpy(values.astype(np.float32)).clamp(-448.0, 448.0)
    return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Patches the interpreter, if it is in use, inside a `with` block."""
    if not interpreted():
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original, original_narrow = builder.cast_impl, builder.create_fp_to_fp

    def cast(self: Any, source: Any, to: Any) -> Any:
        kinds = source.dtype.scalar, to.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(to_bfloat16(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(to_float32(source.data), tl.float32)
        return original(self, source, to)

    def narrow(self: Any, source: Any, to: Any, mode: Any) -> Any:
        if (source.dtype.scalar, to.scalar) == (tl.float32, tl.float8e4nv):
            return interpreter.TensorHandle(to_float8(source.data), tl.float8e4nv)
        return original_narrow(self, source, to, mode)

    builder.cast_impl, builder.create_fp_to_fp = cast, narrow
    try:
        yield
    finally:
        builder.cast_impl, builder.create_fp_to_fp = original, original_narrow


@pytest.fixture
def nearest() -> Iterator[None]:
    with rounding_to_nearest():
        yield
