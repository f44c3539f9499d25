"""Provides the import paths of upstream vime, which is slime with `slime` renamed: `vime.utils.types` is
`slime.utils.types`.

`import vime` installs one finder in each process. A module under two names is one module object, so classes, singletons
and pickles are the same under both names. vime's own modules are found by the normal finder.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGES = ("agent", "backends", "data", "observability", "ray", "rollout", "utils")
"""Packages of slime that plug-ins import. Other names under `vime` are vime's own."""

RENAMED = {
    "rollout.vllm_rollout": "rollout.sglang_rollout",
    "rollout.vllm_streaming_rollout": "rollout.sglang_streaming_rollout",
}
"""Modules that upstream vime names after its engine. slime's module has the names that plug-ins import."""

ENGINE = "vllm.entrypoints.serve.disagg", "vllm.entrypoints.scale_out.token_in_token_out"
"""A package of vLLM that plug-ins import for images, and its name in newer versions (vime.vllm.versions)."""


class Alias:
    """Finds and loads `vime.X` as `slime.X` for the packages above, and the older name of vLLM's package. It implements
    importlib.abc.MetaPathFinder and Loader.

    Neither class is imported, because with `python -m vime` the import would look for `random` in the current folder.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of an alias, or None for vime's own modules and for a module that slime does not have."""
        root, _, rest = name.partition(".")
        if name == ENGINE[0] or name.startswith(f"{ENGINE[0]}."):
            older = path is not None and PathFinder.find_spec(name, path) is not None
            same = ENGINE[0] in sys.modules and sys.modules[ENGINE[0]].__name__ == ENGINE[0]
            return None if older and (same or name == ENGINE[0]) else ModuleSpec(name, self)  # type: ignore[arg-type]
        if root != "vime" or rest.partition(".")[0] not in PACKAGES:
            return None
        parent = name.rpartition(".")[0]
        # In an alias of a package, `path` is slime's: the normal finder would load slime's file a second time.
        if sys.modules[parent].__name__ == parent and PathFinder.find_spec(name, path) is not None:
            return None
        if importlib.util.find_spec(_real(name)) is None:
            return None
        # no instance of the abstract class, see above
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Does nothing. The import system makes an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Registers slime's module under the alias. It keeps its own name and spec."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(_real(name))


def _real(name: str) -> str:
    if name.startswith(ENGINE[0]):
        return name.replace(*ENGINE)
    rest = name.removeprefix("vime.")
    return f"slime.{RENAMED.get(rest, rest)}"


def install() -> None:
    """Inserts the finder before the others, once."""
    if not any(isinstance(finder, Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, Alias())
