"""Launches of Triton kernels that take little time of the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import KernelInterface


class Launcher:
    """Launches a Triton kernel with the compiled form that an earlier launch with the same key used.

    Triton's own launch looks at every argument to find the compiled form, which takes several times as long as the
    launch. A key contains everything from which Triton chooses: the device, dtypes, missing pointers, whether a pointer
    is a multiple of 16 bytes, constants, and integers that `do_not_specialize` does not list.
    """

    def __init__(self, kernel: KernelInterface[Any]) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, CompiledKernel] = {}

    def __call__(
        self, key: Hashable, grid: tuple[int, int, int], device: int, *args: Any, **options: Any
    ) -> None:
        """Launches the kernel with its arguments in order, constants too. `device`: the number of the GPU, -1 for a
        host."""
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(key, grid, device, *args, **options)
        found = self._compiled.get(key)
        if found is not None:
            found[grid](*args)
            return None
        made = self._kernel[grid](*args, **options)
        if isinstance(made, CompiledKernel):  # an interpreter returns none
            self._compiled[key] = made
        return None
