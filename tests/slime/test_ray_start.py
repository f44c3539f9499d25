"""Ray on a machine that is too busy for the 30 s that Ray waits for its first processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray
from ray._private import services

from slime.cluster import guard, ray_start


@pytest.mark.slow
def test_ray_that_does_not_answer_in_time_is_started_again(monkeypatch):
    """The first start never becomes known to the driver, as on a machine that is too busy."""
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
    before = guard.descendants({os.getpid()}, guard.processes())
    try:
        ray_start.connect()
        assert not failing[0] and ray.cluster_resources()["CPU"] > 0
        running = guard.descendants({os.getpid()}, guard.processes()).keys() - before.keys()
        servers = [pid for pid in running if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(servers) == 1, "those of the first start have ended"
    finally:
        ray.shutdown()
