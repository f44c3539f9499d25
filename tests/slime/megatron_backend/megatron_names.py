"""Looks up every name of megatron-core that slime uses in the megatron-core that this process imports.

    python megatron_names.py      prints the result of `look`, as JSON

It checks three things: functions and classes that slime imports or reads from a module, the arguments of slime's
calls, and the methods of Megatron's classes that slime's subclasses replace. Only a run can check the attributes that
slime reads from Megatron's objects.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[3] / "slime"
FILES = (
    *sorted((FOLDER / "megatron_backend").rglob("*.py")),
    *(FOLDER / "config/megatron_flags.py", FOLDER / "bridges/megatron_versions.py"),
)


def look() -> dict[str, Any]:
    """Returns `problems`: the missing names. `checked`: number of checked uses. `replaced`: methods of Megatron's
    classes that slime's classes replace. `version`: version of megatron-core."""
    import slime.megatron_backend

    for module in pkgutil.iter_modules(slime.megatron_backend.__path__):
        importlib.import_module(f"slime.megatron_backend.{module.name}")
    problems: list[str] = []
    checked = 0
    for file in FILES:
        found = list(_uses(file))
        checked += len(found)
        problems += [f"{file.name}: {problem}" for problem in found if problem]
    version: str = sys.modules["megatron.core"].__version__  # type: ignore[attr-defined]
    return {"version": version, "checked": checked, "problems": problems, "replaced": sorted(_replaced())}


def _uses(file: Path) -> list[str | None]:
    """Returns one entry per use of a name in `file`: its problem, or None."""
    tree = ast.parse(file.read_text())
    names: dict[str, Any] = {}
    found: list[str | None] = []
    here = _module(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
            for alias in node.names:
                known = _imported(str(node.module), alias.name)
                found.append(None if known is not None else f"{node.module} has no {alias.name}")
                names[alias.asname or alias.name] = getattr(here, alias.asname or alias.name, known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id)
            if isinstance(owner, ModuleType):
                there = hasattr(owner, node.attr)
                found.append(None if there else f"{node.value.id} has no {node.attr}")
        if isinstance(node, ast.Call) and (called := _value(node.func, names)) is not None:
            found.append(_arguments(node, called))
    return found


def _module(file: Path) -> ModuleType:
    parts = file.relative_to(FOLDER.parent).with_suffix("").parts
    return importlib.import_module(".".join(parts).removesuffix(".__init__"))


def _imported(module: str, name: str) -> Any:
    owner = importlib.import_module(module)
    if hasattr(owner, name):
        return getattr(owner, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return None


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Returns the value of a name or an attribute of a module, and None for any other expression."""
    if isinstance(node, ast.Name):
        value = names.get(node.id)
        return None if isinstance(value, ModuleType) else value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = names.get(node.value.id)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
    return None


def _arguments(node: ast.Call, called: Any) -> str | None:
    """Returns None if `called` takes the arguments of the call. Arguments in * and ** may be anything."""
    try:
        signature = inspect.signature(called)
    except ValueError:
        return None
    positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    keywords = {word.arg: None for word in node.keywords if word.arg is not None}
    whole = len(positional) == len(node.args) and len(keywords) == len(node.keywords)
    try:
        (signature.bind if whole else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return f"{ast.unparse(node.func)} does not take its arguments: {error}"
    return None


def _replaced() -> set[str]:
    """Returns the methods of Megatron's classes that a class of slime replaces."""
    found = set()
    for module in [m for name, m in sys.modules.items() if name.startswith("slime.megatron_backend.")]:
        for owner in vars(module).values():
            if not (inspect.isclass(owner) and owner.__module__ == module.__name__):
                continue
            theirs = [base for base in owner.__mro__ if base.__module__.startswith("megatron.")]
            for name, value in vars(owner).items():
                method = inspect.isfunction(value) and not name.startswith("__")
                if method and any(name in vars(base) for base in theirs):
                    found.add(f"{module.__name__}.{owner.__name__}.{name}")
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
