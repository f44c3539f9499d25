"""Training with megatron-core. Without a GPU its functions stay as they are written: torch.compile, with which it
decorates some, takes a second to import and minutes of a C++ compiler for what a CPU runs as fast without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _as_written(model: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """torch.compile, as a decorator with arguments or without, that compiles nothing."""
    return (lambda function: function) if model is None else model


def _import_megatron() -> None:
    library: Any = torch  # its types do not allow replaced functions
    compile_function = library.compile
    if not torch.cuda.is_available():
        library.compile = _as_written
    try:
        import megatron.core  # noqa: F401  what it decorates with is decided here
    finally:
        library.compile = compile_function


_import_megatron()
