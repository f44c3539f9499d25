"""The part of the user's environment that a run passes to its processes: a user name, no proxy between them, and an
import path without the current folder.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping, MutableMapping

from slime.http import bypass_proxy

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps the current folder off a child's import path. A file `random.py` there would replace Python's module, and code
in a folder `vllm` there would run in the engine, with the run's key in its environment."""
_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def prepare(environ: MutableMapping[str, str]) -> None:
    """For the driver, before anything starts: what it starts inherits this."""
    name_user(environ)
    bypass_proxy(environ, _LOOPBACK)


def name_user(environ: MutableMapping[str, str]) -> None:
    """Containers run under user ids that no file gives a name. torch, Triton and Ray ask for a name (`getpass`), and
    fail without one."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environ["LOGNAME"] = f"uid-{os.getuid()}"


def without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """For servers, which talk with processes of the run only, wherever these are. vllm-router would ask engines and its
    own key server through the proxy."""
    return {name: value for name, value in environ.items() if name.lower() not in _PROXIES}
