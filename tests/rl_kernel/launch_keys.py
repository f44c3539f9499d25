"""Computes which launches make Triton compile: the kernels of rl_kernel, and each launch's cache key.

A launch with a new key is a compilation. Triton's own function computes the key for a Hopper GPU, without one.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import textwrap
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

import rl_kernel

Kernel = KernelInterface[Any]
Key = tuple[tuple[str, object], ...]
"""Each argument with its type and Triton's specialisation for its value, then the options of the launch."""
Binder = Callable[..., tuple[dict[str, Any], list[tuple[str, object]], dict[str, Any]]]
"""Arguments of a launch -> (arguments by name, their entries in the key, options)."""
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def name_of(kernel: Kernel) -> str:
    """Returns a name such as `masked.kernels.moments_kernel`, because two operators have kernels with the same name."""
    module = kernel.fn.__module__.removeprefix("rl_kernel.").removeprefix("ops.")
    return f"{module}.{kernel.fn.__name__}"


def launched_kernels() -> dict[str, Kernel]:
    """Returns all functions of rl_kernel under `triton.jit` that no other kernel calls."""
    found: dict[str, Kernel] = {}
    called: set[str] = set()
    for path in pkgutil.walk_packages(rl_kernel.__path__, "rl_kernel."):
        source = Path(path.module_finder.path, path.name.rpartition(".")[2]).with_suffix(".py")
        if not source.exists() or "triton.jit" not in source.read_text():
            continue
        module = import_module(path.name)
        for kernel in vars(module).values():
            if isinstance(kernel, KernelInterface) and kernel.fn.__module__ == path.name:
                found[name_of(kernel)] = kernel
                called |= {name_of(helper) for helper in _helpers(kernel)}
    return {name: kernel for name, kernel in found.items() if name not in called}


def _helpers(kernel: Kernel) -> list[Kernel]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    names = [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    values = [kernel.fn.__globals__.get(name) for name in names]
    return [value for value in values if isinstance(value, KernelInterface)]


def binder_of(kernel: Kernel) -> Binder:
    """Returns Triton's function for a kernel's keys. The interpreter ignores the decorator's arguments, but keeps
    them."""
    compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(compiled.signature, compiled.params, BACKEND)


class Launches:
    """Kernel -> keys of its launches. No kernel runs, so results are uninitialised memory."""

    def __init__(self) -> None:
        self.binders: dict[Kernel, Binder] = {}
        self.keys: defaultdict[str, set[Key]] = defaultdict(set)

    def record(self, kernel: Kernel, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        if kernel not in self.binders:
            self.binders[kernel] = binder_of(kernel)
        arguments, specialization, options = self.binders[kernel](*args, **kwargs)
        key = []
        for (name, value), (kind, special) in zip(arguments.items(), specialization, strict=True):
            key.append((name, (kind, value if kind == "constexpr" else special)))
        self.keys[name_of(kernel)].add((*key, *options.items()))

    def take(self) -> dict[str, set[Key]]:
        """Returns the keys since the last call."""
        taken, self.keys = dict(self.keys), defaultdict(set)
        return taken


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Records launches instead of running them."""
    made = Launches()

    def run(kernel: Kernel, *args: Any, **kwargs: Any) -> None:
        made.record(kernel, *args, **kwargs)

    for kind in {type(kernel) for kernel in launched_kernels().values()}:
        monkeypatch.setattr(kind, "run", run)
    return made
