"""Imports vLLM's text models that import vision code, for engines on CPUs without torchvision.

vLLM's module of Qwen3.5 imports a function of transformers whose module imports torchvision. The usual package index
has torchvision for CUDA only, which a torch for CPUs cannot load. A text model does not use torchvision, so that module
is imported with a placeholder. A later use of torchvision fails with the name of the missing package.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from slime.bridges.processors import has_torchvision, torchvision_placeholder

MODULE = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def with_finder(finders: list[object]) -> list[object]:
    """Inserts a finder of `MODULE` at the front of `sys.meta_path` if torchvision is missing. Changes the list in
    place."""
    if not has_torchvision():
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
                with torchvision_placeholder():
                    run(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
