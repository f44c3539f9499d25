"""Tests hostile programs: each ends, its limit is named, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from sandbox_cases import DAEMON, PYTHON, SMALL, command, left_behind, run, titled

from slime.agent.sandbox import Limits


@pytest.mark.slow  # a limit that fails affects the whole machine
def test_a_fork_bomb_ends(isolation):
    before = time.monotonic()
    result = command(isolation, "bomb() { bomb | bomb & }; bomb; sleep 30", timeout=10)
    assert result.reason == "processes"
    assert time.monotonic() - before < 9


@pytest.mark.slow
def test_a_python_fork_bomb_that_leaves_its_session_ends(isolation):
    bomb = "import os\nwhile True:\n    try:\n        os.fork() or os.setsid()\n    except OSError:\n        pass"
    result = command(isolation, f"{PYTHON} -c '{bomb}'", timeout=10)
    assert result.reason == "processes"


@pytest.mark.parametrize("stream", ["", ">&2"])
def test_endless_output_ends_the_command(isolation, stream):
    result = command(isolation, f"yes {stream}")
    assert (result.reason, result.truncated) == ("output", True)
    assert len(result.stdout) + len(result.stderr) == SMALL.output_bytes


def test_output_below_the_limit_is_whole(isolation):
    result = command(isolation, "head -c 60000 /dev/zero; head -c 40000 /dev/zero >&2")
    assert (len(result.stdout), len(result.stderr), result.reason) == (60_000, 40_000, "")


def test_output_that_is_no_text_is_replaced(isolation):
    assert command(isolation, r"printf '\377ok'").stdout == "�ok"


def test_a_deaf_process_ends_at_its_time(isolation):
    before = time.monotonic()
    result = command(isolation, "trap '' TERM INT HUP; while :; do sleep 0.1; done", timeout=0.5)
    assert (result.timed_out, result.exit_code) == (True, 137)
    assert time.monotonic() - before < 5


def test_a_stopped_process_ends_at_its_time(isolation):
    assert command(isolation, "kill -STOP $$", timeout=0.5).timed_out


def test_memory_ends_everything(isolation):
    hog = "x = []\nwhile True: x.append(bytearray(b'a' * (1 << 22)))"
    result = command(isolation, f'{PYTHON} -c "{hog}"')
    assert (result.reason, result.exit_code) == ("memory", 137)


def test_memory_of_many_small_processes_counts(isolation):
    hog = "import time; x = bytearray(b'a' * (20 << 20)); time.sleep(30)"
    result = command(isolation, f'for i in $(seq 30); do {PYTHON} -c "{hog}" & done; wait')
    assert result.reason == "memory"


def test_address_space_is_limited(isolation):
    limits = Limits(address_space_bytes=1 << 30)
    result = command(isolation, f"{PYTHON} -c 'bytearray(2 << 30)'", limits=limits)
    assert "MemoryError" in result.stderr


def test_cpu_time_is_limited(isolation):
    result = command(isolation, "while :; do :; done", limits=Limits(cpu_s=1))
    assert result.reason == "cpu"


def test_one_large_file_ends_its_program(isolation):
    result = command(isolation, "exec dd if=/dev/zero of=big bs=1M count=100")
    assert result.reason in ("file size", "disk")  # one file may be as large as the whole folder


def test_many_files_that_fill_the_disk_end_everything(isolation):
    fill = "i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > f$i; done"
    assert command(isolation, fill).reason == "disk"


def test_too_many_files_end_everything(isolation):
    assert command(isolation, "for i in $(seq 600); do : > f$i; done; sleep 10").reason == "files"


def test_a_folder_without_end_ends_and_is_deleted(isolation):
    deep = "while mkdir -p d/d/d/d/d/d/d/d && cd d/d/d/d/d/d/d/d; do :; done; sleep 10"
    assert command(isolation, deep).reason == "files"


def test_a_hidden_file_counts(isolation):
    fill = "mkdir h; i=0; chmod 300 h; while :; do i=$((i+1)); head -c 1000000 /dev/zero > h/f$i; done"
    assert command(isolation, fill).reason == "disk"


def test_zombies_are_taken_and_daemons_end_with_the_sandbox(isolation):
    async def body(sandbox):
        name = f"daemon-{sandbox.sandbox_id}"
        await sandbox.exec(DAEMON.format(name=name), env={"SHELL": "x"})
        # The process clears its environment, and its parents are gone.
        await sandbox.exec(f"env -i setsid bash -c 'exec -a {name} sleep 1000 &' >/dev/null 2>&1 &")
        end = time.monotonic() + 20
        while titled(name) != 2:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        await sandbox.exec("for i in $(seq 20); do (sh -c 'exit 0' &); done; sleep 0.3")
        zombies = (await sandbox.exec("cat /proc/[0-9]*/stat 2>/dev/null | grep ') Z' | grep '(sh)'")).stdout
        assert zombies == ""
        return name

    assert not left_behind(run(isolation, body))


def test_a_daemon_that_holds_the_pipes_does_not_hold_the_command(isolation):
    before = time.monotonic()
    assert command(isolation, "setsid sleep 100 & echo done").stdout == "done\n"
    assert time.monotonic() - before < 5


def test_a_command_cannot_end_its_owner(isolation):
    async def body(sandbox):
        await sandbox.exec("kill -9 1; kill -9 $PPID; kill -9 -1", timeout=5)
        return (await sandbox.exec("echo alive")).stdout

    if isolation == "namespaces" or os.getuid() == 0:
        assert run(isolation, body) == "alive\n"
