"""The part of the user's environment that a run passes to its processes: a user name, and no proxy between them."""

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
    """For the driver, before anything starts: what it starts inherits this."""
    name_user(environ)
    from slime.http import bypass_proxy  # needs aiohttp, which commands that start nothing do without

    bypass_proxy(environ, _LOOPBACK)


def name_user(environ: MutableMapping[str, str]) -> None:
    """Containers run under user ids that no file gives a name. torch, Triton and Ray ask for a name (`getpass`), and
    fail without one."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environ["LOGNAME"] = f"uid-{os.getuid()}"


def use_utf8(environ: MutableMapping[str, str]) -> None:
    """Text files are UTF-8, also those that libraries open without an encoding, here and in all children."""
    if codecs.lookup(locale.getencoding()).name == "utf-8":
        return
    environ["PYTHONUTF8"] = "1"
    for name in ("C.UTF-8", "C.utf8", "en_US.UTF-8"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            return


def without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """For servers, which talk with processes of the run only, wherever these are. vllm-router would ask engines and its
    own key server through the proxy."""
    return {name: value for name, value in environ.items() if name.lower() not in _PROXIES}
