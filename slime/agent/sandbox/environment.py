"""Makes the environment of a sandbox's commands from a few variables of the host, so that it holds no key or proxy."""

from __future__ import annotations

import os
import sys

PASSED = ("LANG", "LC_ALL", "LC_CTYPE", "TZ")
_SYSTEM = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def environment(home: str, tmp: str) -> dict[str, str]:
    """Returns the environment of every command. The Python of this process comes first on PATH."""
    path = dict.fromkeys([os.path.dirname(sys.executable), *_SYSTEM])
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {
        "LANG": "C.UTF-8",
        **passed,
        "PATH": ":".join(path),
        "HOME": home,
        "TMPDIR": tmp,
        "USER": "sandbox",
    }
