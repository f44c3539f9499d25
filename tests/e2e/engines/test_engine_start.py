"""Real servers start and end: errors at the start, and no process that outlives a kill -9."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engine_fixtures import make_checkpoint

from slime.config import Config
from vime.pool.router import RouterSpec
from vime.vllm.control import VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.vllm.router import VllmRouter
from vime.vllm.server import VllmServer, VllmSpec

pytestmark = pytest.mark.e2e
KEY = "start-key"


def spec(root: Path, **changes: object) -> VllmSpec:
    settings = {
        "model_path": str(root / "none"),
        "run_key": KEY,
        "log_path": str(root / "engine.log"),
        "weight_dir": str(root),
        "start_timeout_s": 120.0,
    }
    return VllmSpec(**{**settings, **changes})


def test_a_server_that_cannot_start_shows_its_last_log_lines(tmp_path: Path) -> None:
    """The checkpoint does not exist, so the pool stops the other processes that it has started."""
    before = psutil.Process().children(recursive=True)
    pool = VllmEnginePool([spec(tmp_path)], RouterSpec(run_key=KEY, log_path=str(tmp_path / "router.log")))
    with pytest.raises(
        RuntimeError, match=r"(?s)must become healthy, got exit status 1; .*the last lines of .*none"
    ):
        pool.start()
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.slow
def test_the_cause_of_a_failed_start_comes_first(tmp_path: Path) -> None:
    """The cause is in the log of vLLM's engine core; the log ends with the traceback of the API server."""
    server = VllmServer(spec(make_checkpoint(tmp_path), model_path=str(tmp_path), cache_bytes=1024))
    server.start()
    try:
        with pytest.raises(RuntimeError) as error:
            server.wait_ready()
    finally:
        server.stop()
    first, *log = str(error.value).splitlines()
    assert "got exit status 1; ValueError: No available memory for the cache blocks" in first
    assert "; raise --vllm-gpu-memory-utilization, or lower --vllm-max-model-len; the last lines of" in first
    assert not any("No available memory" in line for line in log), "otherwise the log's end would do"


@pytest.mark.slow
def test_a_server_takes_its_device_once_its_gate_is_open(tmp_path: Path) -> None:
    """The server may share its GPU with a trainer. vLLM takes the device, and logs it, only after the gate has
    opened."""
    log = tmp_path / "engine.log"
    gate = tmp_path / "engine.log.gate"
    gate.touch()  # a killed run has left this file
    server = VllmServer(spec(make_checkpoint(tmp_path), model_path=str(tmp_path), waits=True, sleeps=False))
    server.start()
    try:
        end = time.monotonic() + 120
        while f"the engine waits for {gate}" not in log.read_text() and time.monotonic() < end:
            assert server.poll() is None, server.tail_log()
            time.sleep(0.2)
        time.sleep(2)
        assert "Loading weights took" not in log.read_text()
        server.open_gate()
        server.wait_ready()
        waited, loaded = (
            log.read_text().index(text) for text in ("the engine waits", "Loading weights took")
        )
        assert waited < loaded
        assert "DeprecationWarning" not in log.read_text(), "nor of how we start it"
    finally:
        server.stop()
    assert not gate.exists()


@pytest.mark.slow
def test_an_engine_that_dies_beside_a_trainer_ends_the_wait_for_it(tmp_path: Path) -> None:
    """The engine has a valid flag that does not fit this model, while another actor builds a large model."""
    import ray

    from slime.cluster.calls import first_failure_or_all
    from vime.pool.ray_server import RayEngineServer

    @ray.remote(num_cpus=0)
    class Trainer:
        def build(self) -> None:
            time.sleep(600)

    model = str(make_checkpoint(tmp_path / "model"))
    wrong = spec(tmp_path, model_path=model, waits=True, vllm_argv=("--max-model-len", "1000000"))
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    try:
        calls = {Trainer.remote().build.remote(): "trainer-0"}
        pool = VllmEnginePool(
            [wrong],
            RouterSpec(run_key=KEY, log_path=str(tmp_path / "router.log")),
            spawn=lambda spec: RayEngineServer(spec, {"num_cpus": 1}, VllmServer),
        )
        config = Config.from_flat({"run_dir": str(tmp_path)})
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?s)got exit status 1; .*max_model_len .*the last lines of"):
            pool.launch()
            first_failure_or_all(config, calls, check=pool.check_launched)
        assert time.monotonic() - began < 120
        assert ray.wait(list(calls), timeout=0)[0] == [], "the trainer was not waited for"
        pool.stop()
        assert (tmp_path / "engine.log").read_text().count("the engine waits") == 0
    finally:
        ray.shutdown()


def test_a_server_that_takes_too_long_shows_its_last_log_lines(tmp_path: Path) -> None:
    server = VllmServer(spec(make_checkpoint(tmp_path), model_path=str(tmp_path), start_timeout_s=3.0))
    server.start()
    try:
        with pytest.raises(
            RuntimeError, match=r"--engine-start-timeout-s 3, got no answer; the last lines of"
        ):
            server.wait_ready()
    finally:
        server.stop()
    assert server.poll() is not None


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"port of the engine server must be free, got 127\.0\.0\.1:{port} in use"
        ):
            VllmServer(spec(tmp_path, port=port)).start()
        with pytest.raises(ValueError, match=rf"router.* must be free, got 127\.0\.0\.1:{port} in use"):
            VllmRouter(RouterSpec(run_key=KEY, log_path=str(tmp_path / "r.log"), port=port)).start()
    assert not (tmp_path / "engine.log").exists()


def test_a_router_restarts_and_keeps_its_address(tmp_path: Path) -> None:
    router = VllmRouter(RouterSpec(run_key=KEY, log_path=str(tmp_path / "router.log")))
    url = router.start()
    router.wait_ready()
    assert router.engines() == []
    router.stop()
    assert router.start() == url
    router.wait_ready()
    router.stop()


@pytest.mark.slow
def test_an_engine_in_a_ray_actor_serves_and_ends_with_it(tmp_path: Path) -> None:
    import ray

    from vime.pool.ray_server import RayEngineServer

    make_checkpoint(tmp_path / "model")
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    try:
        server = RayEngineServer(
            spec(tmp_path, model_path=str(tmp_path / "model")), {"num_cpus": 1}, VllmServer
        )
        url = server.start()
        server.wait_ready()
        assert VllmControl(url, KEY).weight_version() == -1
        assert server.poll() is None
        assert "Application startup complete" in server.tail_log()
        started = [
            p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
        ]
        assert len(started) == 2, "supervisor and API server"
        os.kill(ray.get(server._actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        assert psutil.wait_procs(started, timeout=15)[1] == []
        assert server.poll() == -1
        assert "lost actor" in server.tail_log()
        server.stop()
    finally:
        ray.shutdown()


_DRIVER = """
import sys, time, json
from slime.config import Config
from vime.vllm.control import VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.pool.router import RouterSpec
from vime.vllm.server import VllmSpec
root = sys.argv[1]
spec = VllmSpec(model_path=root + "/model", run_key="k", log_path=root + "/e.log", weight_dir=root)
pool = VllmEnginePool([spec], RouterSpec(run_key="k", log_path=root + "/r.log"))
pool.start()
print(json.dumps(pool.engine_urls), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_survives_a_kill_9_of_the_driver(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert len(json.loads(driver.stdout.readline())) == 1
    started = psutil.Process(driver.pid).children(recursive=True)
    names = " ".join(" ".join(process.cmdline()) for process in started)
    assert "EngineCore" in names and "router_main" in names
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    began = time.monotonic()
    _, alive = psutil.wait_procs(started, timeout=15)
    assert alive == []
    print(f"all gone after {time.monotonic() - began:.1f} s")
