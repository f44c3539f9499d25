"""Tests the cache of prompts on a file system without flock, which a test cannot make. No wait is silent or endless."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time

import pytest
from datasets import builder

from slime.data import cache_lock
from slime.data.files import find_source, read_table


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_lock, "_SAY_EVERY_S", 0.2)
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "1+1="}) + "\n", encoding="utf-8")
    return find_source(str(path))


def no_flock(monkeypatch, code: int) -> None:
    def flock(*arguments):
        raise OSError(code, "no flock here")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_prompts_are_read_without_flock(prompts, monkeypatch, code):
    no_flock(monkeypatch, code)
    before = builder.FileLock
    assert len(read_table(prompts)) == 1
    assert builder.FileLock is before
    assert not list(prompts.files[0].parent.rglob("*.lock"))


@pytest.mark.parametrize("left", ["77\nnode-3\n", ""])
def test_a_lock_that_another_host_left_ends_the_wait(prompts, tmp_path, monkeypatch, capsys, left):
    """flock leaves an empty file if it works."""
    no_flock(monkeypatch, errno.ENOSYS)
    monkeypatch.setattr(cache_lock, "_LIMIT_S", 0.5)
    read_table(prompts)
    table = next(path for path in (tmp_path / "cache").rglob("dataset_info.json")).parent
    lock = table.with_name(f"{table.name}_builder.lock")
    lock.write_text(left, encoding="utf-8")
    who = "process 77 on node-3" if left else "a process that left no name"
    with pytest.raises(ValueError, match=f"got {lock} of {who} for .* without flock; remove this file"):
        read_table(prompts)
    assert f"note: waiting for {who}, which has had the lock {lock}" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, errno.ENOSYS])
def test_a_lock_that_is_held_is_waited_for_and_said(tmp_path, monkeypatch, capsys, code):
    """The lock is held longer than another host's file would count."""
    if code:
        no_flock(monkeypatch, code)
    monkeypatch.setattr(cache_lock, "_SAY_EVERY_S", 0.1)
    monkeypatch.setattr(cache_lock, "_LIMIT_S", 0.2)
    path = str(tmp_path / "a.lock")
    held = threading.Event()

    def hold() -> None:
        with cache_lock.CacheLock(path):
            held.set()
            time.sleep(0.6)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    with cache_lock.CacheLock(path):
        pass
    thread.join()
    who = f"process {os.getpid()} on {os.uname().nodename}" if code else "another process"
    assert f"note: waiting for {who}, which has had the lock {path} for 0 s" in capsys.readouterr().err
