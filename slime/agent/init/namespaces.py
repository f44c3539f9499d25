"""A view of the host for one sandbox: own users, processes, network and mounts. Refused with OSError by many hosts.

A sandbox sees the system's programs and settings, this process's Python, and the folders that the caller shows. No
other file of the host is there, and so no prompt file, run directory or checkpoint. Only the sandbox's folder, /tmp and
/dev/shm can be written. /dev holds the devices that every program needs, and no GPU.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from slime.agent.init import kernel

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix"),
    "/sys/devices/system/cpu",
)
"""Folders of the host that every sandbox sees, where the host has them."""
_EMPTY = ("/home", "/root", "/run", "/mnt", "/media", "/srv", "/proc")
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")
"""Files in memory, of a limited size each."""
_TCP_BUFFERS = "4096 65536 106496"
_MOST_LINKS = 40


def unshare(network: bool) -> None:
    """Leaves the host's namespaces. The caller's next child is process 1 of a new process namespace, which has all its
    later children, too. The caller stays outside: no process of the namespace has a number for the caller.

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


def hide(folder: str, hidden: list[str], shown: list[str], tmp_bytes: int) -> None:
    """Makes a new root with the system's folders, `shown` and `folder`. The caller must have its own mount namespace.
    `hidden` files and folders are empty, except for `shown` and `folder` in them.

    Root does this before it changes its user, because a Python in /root is in reach of root only.
    """
    kernel.mount("", "/", "", kernel.REC | kernel.PRIVATE)
    held = os.open(folder, os.O_PATH)
    root, flags = folder, kernel.NOSUID | kernel.NODEV
    kernel.mount("tmpfs", root, "tmpfs", flags, "mode=755,size=1m")
    for path in SYSTEM:
        _show(root, path)
    for path in _EMPTY:
        os.makedirs(root + path, exist_ok=True)
    for path in hidden:
        _cover(root + os.path.realpath(path))
    _make_dev(root)
    for path in SCRATCH:
        os.makedirs(root + path, exist_ok=True)
        kernel.mount("tmpfs", root + path, "tmpfs", flags, f"mode=1777,size={tmp_bytes}")
    for path in shown:
        _show(root, path)
    os.makedirs(root + folder, exist_ok=True)
    kernel.bind_descriptor(held, root + folder)
    os.close(held)
    # A kernel mounts a new /proc only where the old one is in view.
    kernel.bind("/proc", f"{root}/proc")
    kernel.change_root(root)


def seal(folder: str, network: bool) -> None:
    """Called by process 1 after `hide`: only `folder`, /tmp and /dev/shm can be written."""
    kernel.set_read_only("/", True, recursive=True)
    for path in (*SCRATCH, folder):
        kernel.set_read_only(path, False)
    kernel.mount("proc", "/proc", "proc", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)
    # Own namespaces would give the sandbox's code more of the kernel to attack. The line is about this user
    # namespace only; older kernels refuse it.
    with contextlib.suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0", encoding="utf-8")
    if not network:
        kernel.loopback_up()
        # So that the two buffers of a connection's end are no more than one of another socket.
        for name in ("tcp_rmem", "tcp_wmem"):
            Path(f"/proc/sys/net/ipv4/{name}").write_text(_TCP_BUFFERS, encoding="utf-8")


def _show(root: str, path: str, links: int = 0) -> None:
    """Shows a file or folder of the host in the new root, with the symbolic links that lead there."""
    here, parts = "", [part for part in path.split("/") if part]
    while parts:
        parent, here = here, f"{here}/{parts.pop(0)}"
        if os.path.islink(here):
            target = os.readlink(here)
            if not os.path.lexists(root + here):
                os.makedirs(root + parent, exist_ok=True)
                os.symlink(target, root + here)
            if links < _MOST_LINKS:
                _show(root, os.path.normpath(os.path.join(parent or "/", target, *parts)), links + 1)
            return
    if not os.path.exists(here) or os.path.lexists(root + here):
        return
    if os.path.isdir(here):
        os.makedirs(root + here)
    else:
        os.makedirs(os.path.dirname(root + here), exist_ok=True)
        os.mknod(root + here)
    kernel.bind(here, root + here)


def _cover(path: str) -> None:
    """Covers a file or folder, so that nothing can be read there."""
    if os.path.isdir(path):
        kernel.mount("tmpfs", path, "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=755,size=64k")
    elif os.path.exists(path):
        kernel.bind("/dev/null", path)


def _make_dev(root: str) -> None:
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}"):
            os.mknod(f"{root}/dev/{name}", 0o666 | stat.S_IFREG)
            kernel.bind(f"/dev/{name}", f"{root}/dev/{name}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
