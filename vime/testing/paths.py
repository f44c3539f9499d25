"""Import paths of the functions that a check gets, because a run loads its functions by path."""

from __future__ import annotations

import importlib
import sys

from slime.hooks import Hook
from slime.records.errors import FlagError


def function_path(function: Hook | str, name: str) -> str:
    """Returns the dotted path of a function of a module. A path stays as it is.

    Raises ValueError for a function that no module has, such as one that another function has defined. `name` is the
    name of the function's argument in the error.
    """
    if isinstance(function, str):
        return function
    module, own = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = sys.modules.get(module) or importlib.import_module(module)
    if getattr(found, own, None) is not function:
        raise FlagError(
            name,
            "be a function of a module, or its path",
            f"{module}.{own}",
            "define it at the top of a file",
        )
    return f"{module}.{own}"
