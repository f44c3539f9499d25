"""A driver whose Ray has died reports it and ends, wherever it waits. It makes no more calls that need Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime.cluster import watchdog

ROOT = Path(__file__).parents[3]
DRIVER = """
import signal, subprocess, sys, threading, time
from slime.cluster.watchdog import Watchdog
from slime.cluster.ray_watch import RayProcess, RayLost, RayWatch, leave

LISTEN = '''
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(100)
'''
how, folder = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.default_int_handler)
watchdog = Watchdog([folder])
ray = subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], stdout=subprocess.DEVNULL)
try:
    with RayWatch(watchdog, lambda error: print("gives up:", error, flush=True)) as watch:
        watch.watch([RayProcess("the raylet on node 1", "127.0.0.1", int(ray.stdout.readline()))])
        watch.callback(lambda: print("stopped in order", flush=True))
        print(ray.pid, worker.pid, flush=True)
        if how == "actor":
            ray.wait()
            raise RuntimeError("trainer-0 failed")
        if how == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        if how != "end":
            time.sleep(60)
except RayLost as lost:
    print("lost:", lost)
except KeyboardInterrupt:
    print("interrupted")
watchdog.dismiss()
leave(0)
"""


def driven(how: str, tmp_path: Path, *, interrupt: bool = False) -> tuple[str, float]:
    """Returns the output of a driver that waits in the way `how` while its Ray is killed, and the seconds to its end.
    With `interrupt`, the driver gets SIGTERM and its Ray lives."""
    folder = tmp_path / "private"
    folder.mkdir()
    command = [sys.executable, "-c", DRIVER, how, str(folder)]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ray, worker = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    began = time.monotonic()
    try:
        driver.terminate() if interrupt else ray.kill() if how != "end" else None
        driver.wait(timeout=120)
        output, seconds = driver.stdout.read(), time.monotonic() - began
        runs = worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
        assert runs == (interrupt or how == "end")
        return output, seconds
    finally:
        driver.kill()
        for process in (ray, worker):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize("how", ["wait", "actor"])
def test_a_dead_raylet_is_named_wherever_the_driver_waits(how: str, tmp_path: Path) -> None:
    output, seconds = driven(how, tmp_path)
    assert output.startswith("lost: the raylet on node 1 must run until the run ends, got "), output
    assert "stopped in order" not in output and seconds < 10


def test_the_watchdog_also_kills_what_was_started_just_before() -> None:
    driver = (
        "import subprocess, time; from slime.cluster.watchdog import Watchdog; watchdog = Watchdog([]); time.sleep(1);"
        "worker = subprocess.Popen(['sleep', '100']); watchdog.kill_all(); print(worker.wait(timeout=5))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", driver], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert ended.stdout == "-9\n"


@pytest.mark.slow
def test_a_driver_that_hangs_in_ray_is_ended(tmp_path: Path) -> None:
    output, seconds = driven("hang", tmp_path)
    assert output.startswith("gives up: the raylet on node 1 must run"), output
    assert not (tmp_path / "private").exists() and seconds < 20


def test_while_ray_lives_everything_is_stopped_in_order(tmp_path: Path) -> None:
    assert driven("end", tmp_path)[0] == "stopped in order\n"
    (tmp_path / "private").rmdir()
    assert driven("wait", tmp_path, interrupt=True)[0] == "stopped in order\ninterrupted\n"


def test_the_descendants_are_those_that_run() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 100 & wait"])
    below: set[psutil.Process] = set()
    try:
        while {process.name() for process in below} != {"sleep"}:
            below = watchdog.descendants(shell.pid)  # until the shell has started it
        assert shell.pid in {process.pid for process in watchdog.descendants(os.getpid(), recursive=False)}
        shell.kill()
        while shell.pid in {process.pid for process in watchdog.descendants(os.getpid(), recursive=False)}:
            time.sleep(0.01)  # until the shell is a zombie, which has not been waited for
        for process in below:
            process.suspend()
            while not watchdog.is_stopped(process):
                time.sleep(0.01)  # until the signal has arrived
            assert watchdog.is_running(process)
    finally:
        shell.kill()
        shell.wait()
        for process in below:
            process.kill()
    for process in below:
        while watchdog.is_running(process):
            time.sleep(0.01)
    assert watchdog.descendants(shell.pid) == set()
