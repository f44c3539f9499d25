"""Loads user code by its path, for every `--*-path` hook: `package.module.name`, or `file.py:name` for any file. Owns
the errors of a wrong path."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from slime.records.errors import FlagError
from slime.system.import_path import in_current_folder
from slime.system.upstream import RefusedName, describe, package_remedy, remedy_for

_LISTED = 4
"""Maximum number of functions that an error lists."""
_TYPO = 0.9
"""Minimum similarity at which an error suggests the closest module."""

_reading = threading.RLock()
"""Held while a file is read, so that no other thread gets an incomplete module. A file may load another hook."""

Hook: TypeAlias = Callable[..., Any]
"""A function or class of the user. Its signature is that of its flag, which no type can check."""


class MissingHookError(ValueError):
    """The path is well formed, but its module or its name cannot be imported."""


def load_function(path: str, flag: str = "hook path") -> Hook:
    """Returns the function or class at the dotted path "package.module.name", or in a file: "folder/file.py:name".

    A file is read once per process. Its folder becomes the last entry of `sys.path`, so that the file can import files
    from its folder.

    Errors contain `flag` as the user typed it ("--custom-rm-path"). Raises ValueError if the path has neither form or
    the name is not callable. Raises MissingHookError if the file or module does not exist (a module must be on
    PYTHONPATH) or has no such name. An exception inside the user's module is chained to a ValueError with the flag, so
    that a faulty hook differs from a missing hook. If the user's module imports a name that does not exist below
    `slime` or `vime`, the error has the closest name that exists.
    """
    file, name = file_and_name(path)
    if isinstance(path, str) and path.removesuffix(":").endswith(".py"):
        raise _without_name(Path(path.removesuffix(":")), path, flag)
    module_name = ""
    if file is None and isinstance(path, str):
        module_name, _, name = path.rpartition(".")
    dotted = bool(module_name) and all(part.isidentifier() for part in path.split("."))
    if not name.isidentifier() or (file is None and not dotted):
        raise FlagError(
            flag,
            "be a dotted path such as my_module.my_function",
            f"{path!r}",
            "for a file, write folder/my_file.py:my_function",
        )
    if file is not None and not file.is_file():
        raise MissingHookError(
            f"{flag} must name a file that exists, got {path!r}; check the path, also on each other host of the run"
        )
    module_name = module_name or str(file)
    try:
        importlib.invalidate_caches()  # the file may have been written since this process listed its folder
        module = importlib.import_module(module_name) if file is None else _load_module(file)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        if missing and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            remedy = nearest(module_name) or _add_its_folder(module_name, name)
            raise MissingHookError(
                f"{flag} must name a module that can be imported, got {path!r}: there is no module "
                f"{error.name!r}; {remedy}"
            ) from error
        hint = _near_import(error)
        raise MissingHookError(
            f"{flag} must name a module that can be imported, got {path!r}: {error}"
            + (f"; {hint}" if hint else "")
        ) from error
    except Exception as error:  # border: the user's module may raise any error
        raise FlagError(
            flag,
            "name a module that can be imported",
            f"{path!r}: importing {module_name} raised {type(error).__name__}: {error}",
        ) from error
    return _find_callable(module, name, path, flag)


def _without_name(file: Path, path: str, flag: str) -> ValueError:
    """Returns the error for a file's path without a function's name. The file is parsed, but does not run."""
    if not file.is_file():
        return MissingHookError(f"{flag} must name a file that exists, got {path!r}; check the path")
    names = list[str]()
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(file.read_bytes())
        names = [one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    fix = _suggest_functions(f"{file}:", names) or "it defines none"
    return ValueError(f"{flag} must name a function of the file, got {path!r}; {fix}")


def _suggest_functions(prefix: str, names: Sequence[str]) -> str:
    """Returns "write a.py:score or a.py:other", or "" if all names are private."""
    public = [f"{prefix}{name}" for name in names if not name.startswith("_")]
    more = f" (and {len(public) - _LISTED} more)" if len(public) > _LISTED else ""
    return f"write {' or '.join(public[:_LISTED])}{more}" if public else ""


def _functions(module: ModuleType) -> list[str]:
    """Returns the names of the functions that the module itself defines."""
    return [
        name
        for name, one in vars(module).items()
        if getattr(one, "__module__", "") == module.__name__ and inspect.isfunction(one)
    ]


def _find_callable(module: ModuleType, name: str, path: str, flag: str) -> Hook:
    """Returns the function or class `name` of the loaded module. Raises the errors of `load_function`."""
    file, _ = file_and_name(path)
    module_name, joint = (module.__name__, ".") if file is None else (str(file), ":")
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("_")], n=1)
        hint = f"did you mean {module_name}{joint}{near[0]}?" if near else ""
        hint = hint or _suggest_functions(f"{module_name}{joint}", _functions(module))
        hint = hint or f"{module_name} defines no such name"
        raise MissingHookError(f"{flag} must name a function of {module_name}, got {name!r}; {hint}")
    function: object = getattr(module, name)
    if isinstance(function, RefusedName):
        raise MissingHookError(
            f"{flag} must name a function that vime has, got {path!r}, which is {describe(function)} of slime; "
            f"{function.remedy}"
        )
    if not callable(function):
        kind = type(function).__name__
        names = _functions(function) if isinstance(function, ModuleType) else _functions(module)
        prefix = f"{path}." if isinstance(function, ModuleType) else f"{module_name}{joint}"
        hint = _suggest_functions(prefix, names)
        raise FlagError(
            flag, "name a function or class", f"{path!r} of type {kind}{f'; {hint}' if hint else ''}"
        )
    return function


def file_and_name(path: object) -> tuple[Path | None, str]:
    """Returns the file and the name of "folder/file.py:name", or (None, "") for any other path."""
    file, colon, name = path.rpartition(":") if isinstance(path, str) else ("", "", "")
    return (Path(file), name) if colon and file.endswith(".py") else (None, "")


def absolute(path: str) -> str:
    """Returns a path of the same hook for any folder: a relative file becomes absolute, and a dotted path stays."""
    file, name = file_and_name(path)
    return path if file is None else f"{os.path.abspath(file.expanduser())}:{name}"


def _load_module(file: Path) -> ModuleType:
    """Returns the module of a file. The module's name holds a hash of the file's path, so that it hides no installed
    module."""
    real_path = os.path.realpath(file)
    name = f"{file.stem}_{hashlib.sha256(os.fsencode(real_path)).hexdigest()[:12]}"
    with _reading:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, real_path)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        module = importlib.util.module_from_spec(spec)
        if (folder := os.path.dirname(real_path)) not in sys.path:
            sys.path.append(folder)
        sys.modules[name] = module  # As an import does, because dataclasses and pickle look here.
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def nearest(module_name: str) -> str | None:
    """Returns the remedy for a missing module below `slime` or `vime`, else None. The remedy names a replacement, the
    closest module of slime, or the docs page of hooks."""
    root, _, rest = module_name.partition(".")
    if root not in ("slime", "vime") or not rest:
        return None
    if (remedy := remedy_for(rest)) is not None:
        return remedy
    folder = Path(__file__).parent
    names = [
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
    ]
    near = difflib.get_close_matches(rest, names, n=1)
    typo = bool(near) and difflib.SequenceMatcher(None, near[0], rest).ratio() >= _TYPO
    if not typo and (remedy := package_remedy(rest)) is not None:
        return remedy
    return f"did you mean {root}.{near[0]}?" if near else "docs/hooks.md lists the modules for plug-ins"


def _add_its_folder(module_name: str, name: str) -> str:
    if in_current_folder(module_name):
        file = f"{module_name.replace('.', '/')}.py"
        named = f"name the file, {file}:{name}, or " if os.path.isfile(file) else ""
        return f"the current folder has it, and is not searched: {named}add it with PYTHONPATH={os.getcwd()}"
    return "add its folder to PYTHONPATH"


def _near_import(error: ImportError) -> str | None:
    """Returns the remedy for a plug-in's failed import, with the closest module or the closest name, or None without a
    remedy."""
    if isinstance(error, ModuleNotFoundError):
        return nearest(error.name or "")
    found = re.match(r"cannot import name '(\w+)'", str(error))
    module = sys.modules.get(error.name or "")
    if found is None or module is None:
        return None
    near = difflib.get_close_matches(found[1], dir(module), n=1)
    return f"did you mean {error.name}.{near[0]}?" if near else f"{error.name} defines no such name"


class SingletonMeta(type):
    """The metaclass of a class with one object: `class Judge(metaclass=SingletonMeta)`.

    The first call of the class creates the object, and later calls return it. The arguments of later calls are not
    read. Each subclass has its own object. Several threads may call the class.
    """

    _instances: dict[type, object] = {}
    _lock = threading.RLock()

    def __call__(cls, *args: object, **kwargs: object) -> object:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Drops all objects, so that the next calls make new ones."""
        with SingletonMeta._lock:
            SingletonMeta._instances.clear()
