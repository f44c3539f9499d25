"""Copies functions of the caller to the processes of a run: a file of pickled functions, and a module that loads it.

The module is a hook file, as --custom-rm-path and the other flags of functions name one. A function of an imported
module is a reference, so the processes need the caller's folders of modules. Other functions, such as those of a
notebook or a script, are copied with the values that they read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from slime.config.fields import spelled
from slime.records.errors import FlagError

Function: TypeAlias = Callable[..., object]
FOLDER = "python"
"""Folder of the run directory with the functions."""
_MODULE = '''"""The functions that vime.train was called with. Written by vime.train."""

from vime.api.functions import load

globals().update(load(__file__))
'''


HookKey: TypeAlias = tuple[str, int | None]
"""A flag, and the index of a function in its list."""


def write(folder: Path, functions: Mapping[HookKey, Function]) -> dict[HookKey, str]:
    """Writes the functions, and returns their paths as values of their flags. Raises ValueError for a function that
    cannot be copied."""
    import cloudpickle  # only a caller with functions needs it

    copies, paths = dict[str, bytes](), dict[HookKey, str]()
    for key, function in functions.items():
        name = _name(function, copies)
        try:
            copies[name] = cloudpickle.dumps(function)
        except Exception as error:  # border: values that the user's function reads may raise any error
            raise FlagError(
                spelled(key[0]),
                "be a function that can be copied to the processes of the run",
                f"{type(error).__name__}: {error}",
                "make the values that it reads inside the function, or move it to a module",
            ) from error
        paths[key] = f"{(folder / 'functions.py').resolve()}:{name}"
    folder.mkdir(parents=True, exist_ok=True)
    path = [os.path.abspath(entry) for entry in sys.path]
    (folder / "functions.pkl").write_bytes(pickle.dumps((path, copies)))
    (folder / "functions.py").write_text(_MODULE, encoding="utf-8")
    return paths


def _name(function: Function, taken: Mapping[str, bytes]) -> str:
    """Returns the function's own name if it is an identifier, else `function`. A number makes it unique."""
    own = getattr(function, "__name__", type(function).__name__)
    own = own if own.isidentifier() else "function"
    return own if own not in taken else f"{own}_{len(taken)}"


def remove(folder: Path) -> None:
    """Removes the files of `write`, and the folder."""
    if folder.is_dir():
        for suffix in (".py", ".pkl"):
            (folder / "functions").with_suffix(suffix).unlink(missing_ok=True)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder with other files stays
            folder.rmdir()


def load(module: str) -> dict[str, Function]:
    """Returns the functions next to the module, by their names. Folders of the caller's modules come last."""
    text = Path(module).with_suffix(".pkl").read_bytes()
    path, copies = pickle.loads(text)  # ok: vime.train of the same user wrote the file
    sys.path.extend(entry for entry in path if entry not in sys.path)
    return {name: pickle.loads(copy) for name, copy in copies.items()}  # ok: as above
