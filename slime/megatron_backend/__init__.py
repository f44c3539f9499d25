"""Training with megatron-core. Without a GPU, torch.compile is disabled for functions that megatron-core decorates with
it. Its import takes a second, and the C++ compiler takes minutes for code that a CPU runs as fast uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _as_written(model: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Replaces torch.compile, as a decorator with or without arguments. It compiles nothing."""
    return (lambda function: function) if model is None else model


def _import_megatron() -> None:
    library: Any = torch  # its types do not allow replaced functions
    compile_function = library.compile
    if not torch.cuda.is_available():
        library.compile = _as_written
    try:
        import megatron.core  # noqa: F401  the import applies the decorators
    finally:
        library.compile = compile_function


_import_megatron()
