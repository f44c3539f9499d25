"""Sets the import path of a run's processes: installed packages, the folder of these packages, and PYTHONPATH.

The folder where the user starts a run is not on the path. A file `random.py` there would replace Python's module, and
code in a folder `vllm` there would run with the run's key in its environment. The command calls this module before all
other modules, so this module imports only modules that Python has already loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec

VARIABLE = "PYTHONPATH"
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps the current folder and the script's folder off the path of a child process and of its child processes."""
UTF8 = {"PYTHONUTF8": "1"}
"""Makes a child process read text as UTF-8 under any locale, also if a library opens a file without an encoding."""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def entries(environ: Mapping[str, str]) -> list[str]:
    """Returns the folders of PYTHONPATH as absolute paths, without empty entries. To Python, an empty entry, as in
    `PYTHONPATH=/a:$PYTHONPATH` with no earlier value, means the current folder, which no user intends."""
    return [os.path.abspath(entry) for entry in environ.get(VARIABLE, "").split(os.pathsep) if entry]


def leave_current_folder(path: list[str], environ: MutableMapping[str, str]) -> None:
    """Removes the current folder from `path` (sys.path), and the empty entries from PYTHONPATH.

    The folder of these packages and the folders in PYTHONPATH stay on the path.
    """
    named = entries(environ)
    try:
        here = os.getcwd()
    except OSError:  # the folder was removed
        here = ""
    if here not in (ROOT, *named):
        path[:] = [entry for entry in path if entry not in ("", here)]
    if VARIABLE in environ:
        environ[VARIABLE] = os.pathsep.join(named)


def show_packages(environ: Mapping[str, str]) -> None:
    """Starts this process's command again with ROOT on PYTHONPATH, if another folder hides one of these packages.

    Python takes a folder `vime` without __init__.py on PYTHONPATH, such as a clone of the repository, for the package,
    and does not call the finder of an editable install. A package in a folder of the path comes before such folders.
    """
    specs = map(find_spec, ("rl_kernel", "slime", "vime"))
    hidden = any(spec is not None and spec.origin is None for spec in specs)
    if hidden and ROOT not in (named := entries(environ)):
        path = os.pathsep.join([*named, ROOT])
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, VARIABLE: path})


def get_worker_path(environ: Mapping[str, str]) -> list[str]:
    """Returns the first entries of a worker's path on any host: ROOT if these packages are not installed, and
    PYTHONPATH."""
    installed = os.path.basename(ROOT) in ("site-packages", "dist-packages")
    return [*([] if installed else [ROOT]), *entries(environ)]


def in_current_folder(module: str) -> bool:
    """Returns True if the current folder has this module, but is not on sys.path."""
    name = module.partition(".")[0]
    return os.getcwd() not in sys.path and (os.path.isfile(f"{name}.py") or os.path.isdir(name))
