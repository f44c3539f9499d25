"""Replaced symbols of foreign programs: one record per symbol, in the table of the program's bridge.

vLLM's table is `vime.vllm.patches.PATCHES`. The others are in this package, one module per program. A house test fails
for an assignment to an attribute of a foreign module or class anywhere else. `vime doctor --patches` prints the tables.
An official extension point of the program is always preferred, and needs no record.

The module imports the standard library only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_applied: dict[str, object] = {}
"""Symbol -> the object that `apply` stored there. A symbol counts as replaced while it is still that object."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A symbol of a foreign program that this project replaces.

    Example:
        >>> patch = Patch(
        ...     symbol="ray._private.ray_constants:ENABLE_RAY_CLUSTER",
        ...     replacement="slime.bridges.ray:disabled",
        ...     condition="while a driver joins a cluster on loopback",
        ...     why="ray.init replaces a loopback address with another address of the host",
        ...     removed_when="ray.init keeps a loopback address",
        ... )
        >>> with applied(patch):  # the symbol is replaced in this block
        ...     ray.init("127.0.0.1:6379")
    """

    symbol: str
    """"MODULE:NAME", for example "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request"."""
    replacement: str
    """"MODULE:NAME" of this project's function that takes the original object and returns the replacement. A method
    gets its `self` as usual. The replacement of a static or class method is again a static or class method."""
    condition: str
    """Condition under which a process applies the patch, in words."""
    why: str
    removed_when: str
    """Change in the foreign program after which the patch can be removed."""
    upstream: str = "none"
    """Address or number of the upstream issue that requests the change."""
    versions: str = ""
    """Versions that need the patch, as in a requirement (">=0.27"). Empty means all versions that may be installed."""


def apply(patch: Patch) -> None:
    """Replaces the symbol in this process. Does nothing if the symbol is replaced already. Raises RuntimeError if the
    program has no such symbol."""
    owner, name, before = _find(patch)
    if patch.symbol in _applied and _applied[patch.symbol] is before:
        return
    setattr(owner, name, _replacement(patch, before))
    _applied[patch.symbol] = inspect.getattr_static(owner, name)


@contextlib.contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """Replaces the symbols inside the block, and restores the originals at its end."""
    with ExitStack() as stack:
        for patch in patches:
            owner, name, before = _find(patch)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, _replacement(patch, before))
        yield


def is_applied(patch: Patch) -> bool:
    """Returns whether `apply` has replaced the symbol in this process."""
    return patch.symbol in _applied and _find(patch)[2] is _applied[patch.symbol]


def exists(patch: Patch) -> bool:
    """Returns whether the installed program has the symbol."""
    try:
        _find(patch)
    except RuntimeError:
        return False
    return True


def table(patches: Sequence[Patch], indent: str = "  ") -> str:
    """Returns the records as text: the symbol, then one line for each field that has a value."""
    lines: list[str] = []
    for patch in patches:
        lines.append(patch.symbol.replace(":", "."))
        fields = {
            "applied": patch.condition,
            "versions": patch.versions or "all",
            "why": patch.why,
            "upstream": patch.upstream,
            "removed when": patch.removed_when,
        }
        lines += [f"{indent}{name}: {value}" for name, value in fields.items()]
    return "\n".join(lines)


def _find(patch: Patch) -> tuple[object, str, object]:
    """Returns the object that holds the symbol, the attribute's name, and the attribute without its binding."""
    module, _, path = patch.symbol.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{patch.symbol} must exist to be replaced, got {error!r}; install a version that `vime doctor` accepts"
        ) from error


def _replacement(patch: Patch, before: object) -> object:
    module, _, name = patch.replacement.partition(":")
    make = getattr(import_module(module), name)
    if isinstance(before, staticmethod | classmethod):
        return type(before)(make(before.__func__))
    return make(before)
