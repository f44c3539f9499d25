"""Imports vLLM's text models that import vision code, for engines on CPUs without torchvision.

vLLM's module of Qwen3.5 imports a function of transformers whose module imports torchvision. The usual package index
has torchvision for CUDA only, which a torch for CPUs cannot load. A text model does not use torchvision, so that module
is imported with a placeholder. A later use of torchvision fails with the name of the missing package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

MODULE = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_PARENTS = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def with_finder(finders: list[object]) -> list[object]:
    """Inserts a finder of `MODULE` at the front of `sys.meta_path` if torchvision is missing. Changes the list in
    place."""
    if find_spec("torchvision") is None:
        finders.insert(0, WithoutTorchvision())
    return finders


class WithoutTorchvision(MetaPathFinder):
    """Finds `MODULE` at its usual path and runs it with a placeholder for torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run, loader = spec.loader.exec_module, spec.loader

            def exec_module(module: ModuleType) -> None:
                with placeholder():
                    run(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Absent:
    """Replaces torchvision's functions. Every use raises ModuleNotFoundError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ModuleNotFoundError(
            f"torchvision must be installed for images and videos, got a use of {name} without it; send text only"
        )


@contextmanager
def placeholder() -> Iterator[None]:
    """Makes `from torchvision.transforms.v2 import functional` succeed. Any attribute of the imported `functional`
    raises an error."""
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # transformers caches the answer, which would be wrong inside this context
    modules = {name: ModuleType(name) for name in _PARENTS}
    for module in modules.values():
        module.__path__ = []
    vars(modules[_PARENTS[-1]])["functional"] = Absent()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
