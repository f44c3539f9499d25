"""Makes the temporary folders of a run: one for the sockets, rendezvous files and Ray's session of its processes, and
one for published weights.

Another user of the host may have made a folder with a name that can be guessed. So a folder that does not belong to
this user is never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from slime.cluster.watchdog import remove
from slime.system.start_cache import is_own

SHARED_MEMORY = Path("/dev/shm")
_LONGEST_SOCKET = "/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_SOCKET_BYTES = 107
"""Maximum length of a unix socket's path on Linux."""
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def make_folder() -> Path:
    """Makes a new folder in TMPDIR, or in /tmp if the paths of Ray's sockets would be too long in TMPDIR."""
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
    """Makes `folder` the TMPDIR of this process and its children until `stack` ends. Then the folder is removed.

    torch's compiled kernels stay outside this folder, so that the next run finds them. They are inside this folder if
    another user could have put kernels outside.
    """
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    if _INDUCTOR not in os.environ:
        os.environ[_INDUCTOR] = str(_kernel_cache(folder))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

    def restore() -> None:
        tempfile.tempdir = before[1]
        if before[0] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before[0]
        remove([str(folder)])

    stack.callback(restore)


def _kernel_cache(folder: Path) -> Path:
    """Returns the folder in which torch keeps compiled kernels."""
    kernels = folder.parent / f"torchinductor_{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        kernels.mkdir(mode=0o700)
    if is_own(kernels):
        return kernels
    print(
        f"note: {kernels} belongs to another user or can be written by one, so torch compiles its kernels anew for "
        "this run; remove that folder",
        file=sys.stderr,
    )
    return folder / kernels.name


def make_weights_folder(parent: Path, run_dir: Path, stack: ExitStack) -> Path:
    """Makes a new folder in `parent` for the weights of the run in `run_dir`, locked until `stack` ends.

    Removes the folders that earlier runs in `run_dir` left when they were killed.
    """
    remove([str(left) for left in left_weights(parent, run_dir)])
    folder = Path(tempfile.mkdtemp(prefix=_weights_prefix(run_dir), dir=parent))
    _locked(folder, stack)
    return folder


def left_weights(parent: Path, run_dir: Path) -> list[Path]:
    """Returns the folders in `parent` with the weights of a run in `run_dir` whose processes were all killed."""
    found = []
    for left in parent.glob(f"{_weights_prefix(run_dir)}*"):
        with ExitStack() as looking:
            if is_own(left) and _locked(left, looking):
                found.append(left)
    return found


def _weights_prefix(run_dir: Path) -> str:
    name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    return f"vime-{os.getuid()}-{name}-"


def _locked(folder: Path, stack: ExitStack) -> bool:
    """Locks a folder until `stack` ends. Returns False if another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def keep_ray_logs(folder: Path, to: Path) -> None:
    """Copies the logs of Ray's own processes out of the folder, if Ray had started."""
    logs = folder / "session_latest" / "logs"
    if logs.is_dir():
        shutil.copytree(logs, to, dirs_exist_ok=True, ignore_dangling_symlinks=True)
