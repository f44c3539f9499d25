"""A view of the host for one sandbox: own users, processes, network and mounts. Refused with OSError by many hosts.

The host's files are there to read, except the folders of users, /run and /tmp. Only the sandbox's folder, /tmp and
/dev/shm can be written. /dev holds the devices that every program needs, and no GPU.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from slime.agent.init import kernel

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_HIDDEN = ("/root", "/home", "/run", "/var/run", "/mnt", "/media")
_SCRATCH = ("/tmp", "/var/tmp")


def unshare(network: bool) -> None:
    """Leave the host's namespaces. The caller's next child is process 1 of the new ones.

    `network`: keep the host's network.
    """
    user, group = os.getuid(), os.getgid()
    kernel.unshare(
        kernel.NEWUSER
        | kernel.NEWNS
        | kernel.NEWPID
        | kernel.NEWIPC
        | kernel.NEWUTS
        | (0 if network else kernel.NEWNET)
    )
    # Without this line the kernel lets nobody without privileges write gid_map.
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")


def hide(folder: str, hidden: list[str], keep: list[str], tmp_bytes: int) -> None:
    """In a mount namespace of its own: `hidden` folders and those of users are empty, but for `folder` and `keep`.

    Root does this before it changes its user, because a Python in /root is in reach of root only.
    """
    kernel.mount("", "/", "", kernel.REC | kernel.PRIVATE)
    held = {path: os.open(path, os.O_PATH) for path in dict.fromkeys([folder, *keep]) if os.path.isdir(path)}
    for place in _outermost([*_HIDDEN, *_SCRATCH, *hidden]):
        scratch = place in _SCRATCH
        mode = "1777" if scratch else "755"
        kernel.mount("tmpfs", place, "tmpfs", kernel.NOSUID | kernel.NODEV, f"mode={mode},size={tmp_bytes}")
        for path, descriptor in held.items():
            if path == place or path.startswith(place + "/"):
                os.makedirs(path, exist_ok=True)
                kernel.bind(descriptor, path, recursive=path != folder)
    for descriptor in held.values():
        os.close(descriptor)


def seal(folder: str, tmp_bytes: int, network: bool) -> None:
    """Called by process 1 after `hide`: only `folder`, /tmp and /dev/shm can be written."""
    kernel.set_read_only("/", True, recursive=True)
    for place in _outermost([*_SCRATCH]):
        kernel.set_read_only(place, False)
    held = os.open(folder, os.O_PATH)
    kernel.bind(held, folder)
    os.close(held)
    kernel.set_read_only(folder, False)
    _make_dev(tmp_bytes)
    kernel.mount("proc", "/proc", "proc", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)
    # Own namespaces would give the sandbox's code more of the kernel to attack. The line is about this user
    # namespace only; older kernels refuse it.
    with contextlib.suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0", encoding="utf-8")
    if not network:
        kernel.loopback_up()
    os.chdir(folder)


def _outermost(places: list[str]) -> list[str]:
    """The real folders among `places`, without those below another one."""
    real = sorted({os.path.realpath(place) for place in places if os.path.isdir(place)} - {"/"})
    return [one for one in real if not any(one.startswith(other + "/") for other in real)]


def _make_dev(tmp_bytes: int) -> None:
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES if os.path.exists(f"/dev/{name}")}
    kernel.mount("tmpfs", "/dev", "tmpfs", kernel.NOSUID | kernel.NOEXEC, "mode=755,size=64k")
    for name, descriptor in devices.items():
        os.mknod(f"/dev/{name}", 0o666 | stat.S_IFREG)
        kernel.bind(descriptor, f"/dev/{name}")
        os.close(descriptor)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.mkdir("/dev/shm")
    kernel.set_read_only("/dev", True)
    flags = kernel.NOSUID | kernel.NODEV
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"mode=1777,size={tmp_bytes}")
