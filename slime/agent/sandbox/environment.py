"""The environment of a sandbox's commands: a short list of the host's variables, so that no key or proxy gets in."""

from __future__ import annotations

import os
import sys

PASSED = ("LANG", "LC_ALL", "LC_CTYPE", "TZ")
_SYSTEM = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def environment(home: str, tmp: str) -> dict[str, str]:
    """What every command gets. This process's Python comes first on PATH."""
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
