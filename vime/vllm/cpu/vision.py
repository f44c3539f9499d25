"""Imports vLLM's models that import code for images, for engines on CPUs without torchvision.

vLLM's modules of Qwen's models and of Gemma 3 import modules of transformers that import torchvision. The usual package
index has torchvision for CUDA only, which a torch for CPUs cannot load. Engines get processed images, so these modules
are imported with a placeholder. A later use of torchvision fails with the name of the missing package.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from slime.bridges.processors import has_torchvision, torchvision_placeholder

MODULES = tuple(f"transformers.models.{kind}.image_processing_{kind}" for kind in ("qwen2_vl", "gemma3"))


def with_finder(finders: list[object]) -> list[object]:
    """Inserts a finder of `MODULES` at the front of `sys.meta_path` if torchvision is missing. Changes the list in
    place."""
    if not has_torchvision():
        finders.insert(0, WithoutTorchvision())
    return finders


class WithoutTorchvision(MetaPathFinder):
    """Finds `MODULES` at their usual paths and runs them with a placeholder for torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run, loader = spec.loader.exec_module, spec.loader

            def exec_module(module: ModuleType) -> None:
                with torchvision_placeholder():
                    run(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
