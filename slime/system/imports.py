"""Imports without the garbage collector, which takes a fifth of the time of large imports, and checks for packages."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected(*, freeze: bool) -> Iterator[None]:
    """Disables the garbage collector inside the block. With `freeze`, the collector ignores all objects that exist at
    the block's end, because modules live as long as the process. Freeze only in a process with a single run, because
    frozen objects are never freed."""
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        gc.enable()


@contextlib.contextmanager
def refused(module: str) -> Iterator[None]:
    """Makes `import module` raise ImportError in this context, as if the module were not installed, unless it was
    imported before. The context is for modules that their importer can do without."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def is_installed(module: str) -> bool:
    """Returns whether `import module` finds a package. A folder of that name without Python code does not count: wandb
    creates such a folder where it has run."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # The parent package is missing.
        return False
    return spec is not None and spec.origin is not None
