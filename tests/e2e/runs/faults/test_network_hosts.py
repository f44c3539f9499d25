"""Tests the two hosts of network_hosts: the link between them can be cut and slowed, and each has its own disk."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from network_hosts import RAY_FOLDER, Host, find_obstacle, two_hosts

OBSTACLE = find_obstacle()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
FETCH = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(len(opener.open(sys.argv[1], timeout=5).read()))
"""
BYTES = 100_000


def fetch(host: Host, url: str) -> tuple[bool, float]:
    """Returns whether the host gets the whole file from the other host, and the seconds."""
    began = time.monotonic()
    done = subprocess.run([*host.prefix, sys.executable, "-c", FETCH, url], capture_output=True, text=True)
    return done.stdout == f"{BYTES}\n", time.monotonic() - began


def test_hosts_have_addresses_a_link_and_disks(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(BYTES))
    with two_hosts(tmp_path) as hosts:
        first, second = hosts.first, hosts.second
        words = ["-m", "http.server", "8000", "--bind", second.address, "--directory", str(tmp_path)]
        with subprocess.Popen(
            [*second.prefix, sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            url, end = f"http://{second.address}:8000/file", time.monotonic() + 20
            while not fetch(first, url)[0]:
                assert time.monotonic() < end and server.poll() is None
            with hosts.slow("400kbit"):
                whole, seconds = fetch(first, url)
                assert whole and seconds > 1.0, "800 kbit less the burst take over a second"
            with hosts.cut():
                assert not fetch(first, url)[0]
            assert fetch(first, url)[0], "the link is back"

            assert [process.pid for process in second.processes()] == [server.pid]
            assert psutil.Process().pid not in [one.pid for one in first.processes()]
            second.leave()
            assert server.wait(5) < 0 and not second.processes()
        full(second)
        (first.disk / "file").write_bytes(b"free")
        assert not (RAY_FOLDER / "filler").exists(), "the machine's own folder is another disk"


def full(host: Host) -> None:
    """Fills the disk of a host, and checks that nothing more can be written."""
    with (host.disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    with pytest.raises(OSError, match="No space left"):
        (host.disk / "more").write_bytes(bytes(1 << 20))
