"""The command line of bubblewrap (`bwrap`), which gives the process of a sandbox its own view of the host.

A sandbox sees the system's programs and settings, this process's Python, and the folders that the caller shows. It sees
no other file of the host, and so no prompt file, run directory or checkpoint. Only the sandbox's folder, /tmp, /var/tmp
and /dev/shm can be written. /dev holds the devices that every program needs, and no GPU.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix"),
    "/sys/devices/system/cpu",
)
"""Folders of the host that every sandbox sees, where the host has them."""
_EMPTY = ("/home", "/root", "/run", "/mnt", "/media", "/srv")
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")
"""Files in memory, of a limited size each."""
_HERE = os.path.dirname(os.path.abspath(__file__))
_CODE = "/run/vime"
_ROOT_KEEPS = ("SETUID", "SETGID", "KILL", "DAC_READ_SEARCH", "FOWNER", "SYS_PTRACE", "NET_ADMIN")
_USER_KEEPS = ("SYS_PTRACE", "NET_ADMIN")
"""Capabilities of process 1, which starts and watches the commands. The commands have no capabilities."""
_PROBE_S = 30
INSTALL = "install the package bubblewrap, version 0.7 or newer (`apt-get install bubblewrap`)"


@dataclass(frozen=True)
class View:
    """The parts of the host that a sandbox sees."""

    folder: str
    hidden: tuple[str, ...] = ()
    """Files and folders that are empty in the sandbox, except for `shown` and `folder` in them."""
    shown: tuple[str, ...] = ()
    tmp_bytes: int = 64 << 20
    host_network: bool = False


@dataclass(frozen=True)
class Way:
    """The way in which this host allows bwrap to make namespaces, or the reason why it refuses (`refused`)."""

    as_root: bool = False
    """bwrap runs as root, and only the commands change to the sandbox's user."""
    refused: str = ""


def code_folder(namespaces: bool) -> str:
    """Returns the folder on sys.path from which the sandbox's process imports `slime.agent.init`."""
    return _CODE if namespaces else os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


def command(view: View, as_root: bool) -> list[str]:
    """Returns the words of bwrap's command line before the command that becomes process 1 of the sandbox."""
    words = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--die-with-parent",
        "--new-session",
    ]
    words += ["--as-pid-1", "--cap-drop", "ALL"] + ([] if as_root else ["--unshare-user"])
    words += [] if view.host_network else ["--unshare-net"]
    for name in _ROOT_KEEPS if as_root else _USER_KEEPS:
        words += ["--cap-add", f"CAP_{name}"]
    covered = [path for path in map(os.path.realpath, view.hidden) if _is_below(path, SYSTEM)]
    words += [*_host(covered), *_devices()]
    for path in SCRATCH:
        words += ["--perms", "1777", "--size", str(view.tmp_bytes), "--tmpfs", path]
    for path in dict.fromkeys(each for folder in view.shown for each in (folder, os.path.realpath(folder))):
        if not _is_below(path, SYSTEM) or _is_below(os.path.realpath(path), tuple(covered)):
            words += [*_parents(path), "--ro-bind-try", path, path]
    words += [*_parents(view.folder), "--bind", view.folder, view.folder]
    words += ["--ro-bind", _HERE, f"{_CODE}/slime/agent/init"]
    for path in ("/", *filter(os.path.isdir, covered)):
        words += ["--remount-ro", path]
    return [*words, "--"]


def _parents(path: str) -> list[str]:
    """Returns the arguments for the folders above `path`. bwrap makes them, too, but closes them to other users if
    `path` is closed to them."""
    parts = path.split("/")[1:-1]
    return [word for end in range(1, len(parts) + 1) for word in ("--dir", "/" + "/".join(parts[:end]))]


def _host(covered: list[str]) -> list[str]:
    """Returns the arguments for the system's folders, with an empty folder or file over each covered path."""
    words = []
    for path in SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        words += ["--ro-bind-try", os.path.realpath(path), os.path.realpath(path)]
    for path in _EMPTY:
        words += ["--dir", path]
    for path in covered:
        words += ["--tmpfs", path] if os.path.isdir(path) else ["--dev-bind-try", "/dev/null", path]
    return words


def _devices() -> list[str]:
    words = ["--proc", "/proc", "--bind", "/proc/sys", "/proc/sys", "--dir", "/dev"]
    for name in DEVICES:
        words += ["--dev-bind-try", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        words += ["--symlink", f"/proc/self/fd{target}", f"/dev/{name}"]
    return words


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{each}/") for each in folders)


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-B", "-c", code]


@functools.cache
def way(user: bool) -> Way:
    """Tries bwrap once. `user` means that this process is root and has a user for each sandbox."""
    if not shutil.which("bwrap"):
        return Way(refused=f"bwrap is not installed: {INSTALL}")
    refused = ""
    for as_root in (True, False) if user else (False,):
        with tempfile.TemporaryDirectory(prefix="vime-probe-") as folder:
            view = View(os.path.realpath(folder), shown=(sys.prefix, sys.base_prefix))
            code = (
                f"import sys; sys.path.insert(0, {_CODE!r}); import slime.agent.init.main as m; m.seal(True)"
            )
            done = subprocess.run(
                [*command(view, as_root), *python(code)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PROBE_S,
                env={"PATH": os.defpath},
                check=False,
            )
        if done.returncode == 0:
            return Way(as_root)
        refused = refused or (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Way(refused=refused)
