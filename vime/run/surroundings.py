"""Prepares the environment that a run passes to its processes: a user name, and no proxy between them."""

from __future__ import annotations

import codecs
import contextlib
import getpass
import locale
import os
from collections.abc import Mapping, MutableMapping

_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def prepare(environ: MutableMapping[str, str]) -> None:
    """Prepares the driver's environment before anything starts. The processes that it starts inherit the
    environment."""
    name_user(environ)
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
