"""The one temporary folder of a run: the sockets, rendezvous files and Ray's session of all its processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from slime.cluster.watchdog import remove

_LONGEST_SOCKET = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_SOCKET_BYTES = 107
"""Linux allows no longer path of a unix socket."""
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def make_folder() -> Path:
    """A new folder in TMPDIR, or in /tmp if the paths of Ray's sockets would be too long in TMPDIR."""
    base = Path(tempfile.gettempdir()).resolve()
    longest = _SOCKET_BYTES - len(_LONGEST_SOCKET) - len("/vime-") - 8
    if len(os.fsencode(base)) <= longest:
        return Path(tempfile.mkdtemp(prefix="vime-", dir=base))
    folder = Path(tempfile.mkdtemp(prefix="vime-", dir="/tmp"))
    print(
        f"note: Ray has unix sockets in TMPDIR, so it must be at most {longest} bytes long, got {base}; the temporary "
        f"files of this run are in {folder}",
        file=sys.stderr,
    )
    return folder


def use_folder(folder: Path, stack: ExitStack) -> None:
    """TMPDIR of this process and of all that it starts is `folder` until `stack` ends. Then the folder is removed.

    torch's compiled kernels stay where they are without this folder, so that the next run finds them.
    """
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ.setdefault(_INDUCTOR, str(folder.parent / f"torchinductor_{os.getuid()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

    def restore() -> None:
        tempfile.tempdir = before[1]
        if before[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[0]
        remove([str(folder)])

    stack.callback(restore)


def keep_ray_logs(folder: Path, to: Path) -> None:
    """Copy the logs of Ray's own processes out of the folder, if Ray had started."""
    logs = folder / "session_latest" / "logs"
    if logs.is_dir():
        shutil.copytree(logs, to, dirs_exist_ok=True, ignore_dangling_symlinks=True)
