"""Makes Triton's interpreter round float32 to bfloat16 as GPUs do, to nearest even. The interpreter itself
truncates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rl_kernel.dispatch import interpreted


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns the bits of float32 values rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Patches the interpreter, if it is in use, inside a `with` block."""
    if not interpreted():
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        kinds = source.dtype.scalar, to.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(to_bfloat16(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(to_float32(source.data), tl.float32)
        return original(self, source, to)

    builder.cast_impl = cast
    try:
        yield
    finally:
        builder.cast_impl = original


@pytest.fixture
def nearest() -> Iterator[None]:
    with rounding_to_nearest():
        yield
