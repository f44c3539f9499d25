"""Tests folders of a run at names that another user of the host can guess."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from slime.system.start_cache import is_own
from vime.run.temporary import make_weights_folder, use_folder

only_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")


def test_weights_get_a_new_folder_and_leftovers_go(tmp_path: Path) -> None:
    parent, run_dir = tmp_path / "shm", tmp_path / "run"
    parent.mkdir()
    with ExitStack() as stack:
        first = make_weights_folder(parent, run_dir, stack)
        assert first.stat().st_mode & 0o777 == 0o700
        (first / "weights-1").mkdir()
        other = make_weights_folder(parent, tmp_path / "other", stack)
        # Another run with the same path, as in another container, continues with its own folder.
        second = make_weights_folder(parent, run_dir, stack)
        assert {*parent.iterdir()} == {first, other, second}
    # The locks end with the process, also by kill -9.
    with ExitStack() as stack:
        third = make_weights_folder(parent, run_dir, stack)
        assert {*parent.iterdir()} == {other, third}


def test_the_lock_ends_with_a_killed_run(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path
from vime.run.temporary import make_weights_folder
parent, run_dir = map(Path, sys.argv[1:])
stack = ExitStack()
print(make_weights_folder(parent, run_dir, stack), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, tmp_path, "run"], stdout=subprocess.PIPE, text=True)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    with ExitStack() as stack:
        made = make_weights_folder(tmp_path, Path("run"), stack)
    assert made.is_dir() and not left.exists()


def test_what_others_can_write_to_is_not_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    open_to_all = tmp_path / "all"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    assert is_own(tmp_path)
    assert not any(is_own(tmp_path / name) for name in ("link", "file", "all"))


@only_as_root
def test_folders_of_another_user_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names are those of published weights and of compiled kernels, which would run as this user."""
    with ExitStack() as stack:
        mine = make_weights_folder(tmp_path, Path("run"), stack)
    squatted = mine.with_name(f"{mine.name[:-8]}squatted")
    kernels = tmp_path / f"torchinductor_{os.getuid()}"
    for folder in (squatted, kernels):
        folder.mkdir()
        os.chown(folder, 54321, 54321)
    with ExitStack() as stack:
        again = make_weights_folder(tmp_path, Path("run"), stack)
        assert again != squatted and is_own(again) and squatted.is_dir() and not mine.exists()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is restored
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        folder = tmp_path / "vime-temporary"
        folder.mkdir()
        with ExitStack() as used:
            use_folder(folder, used)
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / kernels.name)
        assert f"note: {kernels} belongs to another user" in capsys.readouterr().err
