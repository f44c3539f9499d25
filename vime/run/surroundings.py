"""Prepares the environment that a run passes to its processes: a user name, folders for bytecode and compiled kernels,
and no proxy between them."""

from __future__ import annotations

import codecs
import contextlib
import getpass
import locale
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from slime.system.start_cache import start_cache_folder, triton_cache_folder

_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
NO_BYTECODE, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def prepare(environ: MutableMapping[str, str]) -> None:
    """Prepares the driver's environment before anything starts. The processes that it starts inherit the
    environment."""
    name_user(environ)
    name_triton_cache(environ)
    from slime.peers.http import (
        bypass_proxy,  # needs aiohttp, which commands that start nothing do not import
    )

    bypass_proxy(environ, _LOOPBACK)


def name_user(environ: MutableMapping[str, str]) -> None:
    """Sets a user name if the user id has no name, as in containers. torch, Triton and Ray call `getpass`, which fails
    without a name."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environ["LOGNAME"] = f"uid-{os.getuid()}"


def name_triton_cache(environ: MutableMapping[str, str]) -> None:
    """Names the folder in which Triton keeps compiled kernels by default.

    Without the name, torch's compiler names another folder in each process in which it compiles a graph
    (torch/_inductor/runtime/triton_heuristics.py). The first start of an engine compiles a graph, and the second loads
    it. So the second start would look for Triton's kernels in the default folder, and compile them again. On an H200,
    the warm-up of a Qwen3-4B then took 20 s in the second start, and 1 s in the third.
    """
    folder = triton_cache_folder(environ, os.path.expanduser("~"))
    if os.path.isabs(folder):
        environ["TRITON_CACHE_DIR"] = folder


def keep_bytecode(environ: MutableMapping[str, str]) -> None:
    """Sets a folder for bytecode in the user's caches, if vLLM has no bytecode and Python would write none.

    Without bytecode, each process compiles the source of every module that it imports, which doubles the time of its
    imports (scripts/setup.sh). Many images set PYTHONDONTWRITEBYTECODE. Packages are often installed without bytecode
    or by another user.
    """
    spec = find_spec("vllm")
    if (
        spec is None
        or spec.origin is None
        or PREFIX in environ
        or Path(cache_from_source(spec.origin)).exists()
    ):
        return
    if not environ.get(NO_BYTECODE) and os.access(Path(spec.origin).parent, os.W_OK):
        return  # Python writes it at the first import
    folder = start_cache_folder("bytecode")
    if folder is None:
        return
    environ[PREFIX] = sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False
    reason = f"{NO_BYTECODE} is set" if environ.pop(NO_BYTECODE, "") else "its folder cannot be written"
    print(
        f"note: vLLM has no bytecode, and {reason}; this command and its processes keep bytecode in {folder}",
        file=sys.stderr,
    )


def use_utf8(environ: MutableMapping[str, str]) -> None:
    """Makes UTF-8 the encoding of text files, also for libraries that open files without an encoding, here and in all
    children."""
    if codecs.lookup(locale.getencoding()).name == "utf-8":
        return
    environ["PYTHONUTF8"] = "1"
    for name in ("C.UTF-8", "C.utf8", "en_US.UTF-8"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            return


def without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a server without proxies.

    Servers communicate only with processes of the run, on any host. With a proxy, vllm-router would use it to reach
    engines and its own key server.
    """
    return {name: value for name, value in environ.items() if name.lower() not in _PROXIES}
