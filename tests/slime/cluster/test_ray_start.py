"""Joins and starts Ray: an address without a listener, and a machine that is too busy for Ray's limit of 30 s."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import ray
from ray._private import services

from slime.bridges import quiet_agent
from slime.cluster import ray_start, watchdog


@pytest.mark.slow
def test_ray_that_does_not_answer_in_time_is_started_again(monkeypatch):
    """The first start never reaches the driver, as on a machine that is too busy."""
    found, failing = services.get_node, [True]

    def get_node(*args, **kwargs):
        if failing[0]:
            raise RuntimeError("not known yet")
        return found(*args, **kwargs)

    def warned(*args, **kwargs):
        failing[0] = False

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray_start.logger, "warning", warned)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = watchdog.descendants(os.getpid())
    try:
        ray_start.connect()
        assert not failing[0] and ray.cluster_resources()["CPU"] > 0
        running = watchdog.descendants(os.getpid()) - before
        servers = [process for process in running if "gcs_server" in process.name()]
        assert len(servers) == 1, "those of the first start have ended"
    finally:
        ray.shutdown()


def test_an_agent_without_ports_ends_with_the_process_that_started_it(tmp_path):
    """The raylet waits for files with these names. Without them, no cluster of a run would start."""
    command = [sys.executable, "-P", quiet_agent.__file__, "agent.py", f"--session-dir={tmp_path}"]
    with subprocess.Popen([*command, "--node-id=n1", "--head"], stdin=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        end = time.monotonic() + 30
        while len(list(tmp_path.glob("*_n1"))) < 3:
            assert time.monotonic() < end and agent.poll() is None
            time.sleep(0.01)
        assert {path.read_text() for path in tmp_path.iterdir()} == {"-1"}
        agent.stdin.close()
        assert agent.wait(10) == 0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL
    ) as older:  # Ray 2.50 names no node and waits for no file
        assert older.wait(10) == 0


def test_an_address_where_nothing_listens_is_named_within_seconds(monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening, so that no other process gets the port
        address = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        began = time.monotonic()
        with pytest.raises(ValueError, match=f"RAY_ADDRESS must be .* got {address}, where nothing answered"):
            ray_start.connect()
        assert time.monotonic() - began < 2 * ray_start.LISTEN_S


def test_an_address_where_a_server_listens_is_accepted_and_other_forms_are_left_to_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray_start.require_listening(f"127.0.0.1:{server.getsockname()[1]}")
    for form in ("auto", "local", "ray://head"):
        ray_start.require_listening(form)
