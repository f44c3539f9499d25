"""Loads processors of transformers on a machine without torchvision, and lists the symbol that is replaced for it.

The processor of a model for images and videos also loads a video processor, and video processors need torchvision. The
usual package index has torchvision for CUDA only, which a torch for CPUs cannot load. On such a machine, images go
through the image processor that needs Pillow alone, and the video processor holds its settings. The use of that video
processor is an error that names the missing package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

from slime import bridges
from slime.bridges import Patch

BASE_CLASSES = Patch(
    symbol="transformers.processing_utils:MODALITY_TO_BASE_CLASS_MAPPING",
    replacement="slime.bridges.processors:with_known_video_class",
    condition="in a process that loads a processor, without torchvision",
    why="a processor checks the class of its video processor by a name that transformers has with torchvision only",
    removed_when="transformers loads a processor without the parts whose packages are missing",
)
PATCHES = (BASE_CLASSES,)

_VIDEO_PROCESSORS = {
    "Qwen2_5_VLConfig": ("qwen2_vl", "Qwen2VLVideoProcessor"),
    "Qwen3VLConfig": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "Qwen3VLMoeConfig": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "Qwen3_5Config": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "Qwen3_5MoeConfig": ("qwen3_vl", "Qwen3VLVideoProcessor"),
}
"""Configuration class -> package and class of its video processor. With torchvision, transformers has this table."""
_PACKAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_FUNCTIONS = f"{_PACKAGES[-1]}.functional"


class Absent(ModuleType):
    """Replaces torchvision's module of functions. Every use raises ModuleNotFoundError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _missing(name)


def _missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"torchvision must be installed for videos, got a use of {name} without it; install the torchvision of "
        "this torch, or send text and images only"
    )


@contextmanager
def torchvision_placeholder() -> Iterator[None]:
    """Makes imports of torchvision's functions succeed in this block. A later use of a function is an error."""
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # transformers caches the answer, which would be wrong inside this context
    modules: dict[str, ModuleType] = {name: ModuleType(name) for name in _PACKAGES}
    for module in modules.values():
        module.__path__ = []
    modules[_FUNCTIONS] = Absent(_FUNCTIONS)
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            vars(modules[parent])[own] = module
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def has_torchvision() -> bool:
    """Returns whether torchvision is installed, without an import."""
    return find_spec("torchvision") is not None


def allow_no_torchvision() -> None:
    """Lets `AutoProcessor.from_pretrained` load a processor in this process without torchvision. Repeated calls are
    allowed. Does nothing if torchvision is installed."""
    if has_torchvision() or bridges.is_applied(BASE_CLASSES):
        return
    import transformers
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    for config, (package, name) in _VIDEO_PROCESSORS.items():
        with torchvision_placeholder():
            module = import_module(f"transformers.models.{package}.video_processing_{package}")
        settings_only = type(name, (getattr(module, name),), {"__call__": _refuse, "preprocess": _refuse})
        AutoVideoProcessor.register(getattr(transformers, config), settings_only, exist_ok=True)
    bridges.apply(BASE_CLASSES)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise _missing("preprocess")


def with_known_video_class(classes: Mapping[str, object]) -> dict[str, object]:
    """Replaces the class name of video processors by that of a base class which transformers always has."""
    return {**classes, "video_processor": classes["image_processor"]}
