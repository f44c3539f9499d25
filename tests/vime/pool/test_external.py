"""Tests servers that were started separately: their flags, and the error if one does not answer. Starts a real
router."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_cases import good_argv

from vime.backends import backend_for, parse_config
from vime.pool import external
from vime.pool.process import accepts, free_port
from vime.pool.router import RouterSpec
from vime.vllm.external_router import ExternalRouter
from vime.vllm.router import VllmRouter

KEY = secrets.token_hex(32)
ENGINES = "--rollout-external-engine-addrs"


def argv(root: Path, *more: str) -> list[str]:
    base = [token for token in good_argv(root) if token != "--colocate"]
    return [*base, "--rollout-num-gpus", "2", *more]


def test_engines_apart_take_none_of_the_devices_and_read_files(tmp_path: Path) -> None:
    weights = ("--weight-dir", str(tmp_path / "w"))
    c = parse_config(argv(tmp_path, ENGINES, "10.0.0.1:8000", "http://10.0.0.2:8000", *weights))
    assert (c.num_engines, c.cluster.rollout_num_gpus) == (2, 2)
    assert c.weight_update.update_weight_transport == "disk"
    assert external.addresses(c)[1] == {"host": "10.0.0.2", "port": 8000}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((ENGINES, "10.0.0.1:8000"), "--weight-dir must be given with"),
        ((ENGINES, "10.0.0.1"), f"{ENGINES} must be HOST:PORT, got 10.0.0.1;"),
        ((ENGINES, "h:1", "http://h:1", "--weight-dir", "w"), "must name each engine once, got h:1 twice"),
        ((ENGINES, "h:1", "--weight-dir", "w", "--update-weight-transport", "nccl"), "must be disk with"),
        ((ENGINES, "h:1", "--weight-dir", "w", "--colocate"), "must go without --colocate"),
        (("--vllm-router-ip", "h"), "--vllm-router-port must be given with --vllm-router-ip"),
    ],
)
def test_wrong_flags(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_config(argv(tmp_path, *more))
    assert said in str(error.value)


def test_a_port_alone_is_that_of_the_runs_own_router(tmp_path: Path) -> None:
    c = parse_config(argv(tmp_path, "--sglang-router-port", "31000"))
    assert not external.uses(c) and external.router_settings(c) == {"gateway_port": 31000}


@pytest.mark.parametrize("key", ["", "short"])
def test_without_a_key_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("VIME_RUN_KEY", key)
    c = parse_config(argv(tmp_path, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", "1"))
    with pytest.raises(ValueError, match="VIME_RUN_KEY must hold the key"):
        backend_for(c).require_reachable(c)


def test_what_does_not_answer_is_one_line_within_15_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One address rejects connections, the other accepts them and never answers."""
    monkeypatch.setenv("VIME_RUN_KEY", KEY)
    closed = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        flags = (ENGINES, f"127.0.0.1:{closed}", "--weight-dir", str(tmp_path / "w"))
        c = parse_config(
            argv(tmp_path, *flags, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", str(port))
        )
        began = time.monotonic()
        with pytest.raises(ValueError) as error:
            backend_for(c).require_reachable(c)
        assert time.monotonic() - began < 15
    said = str(error.value)
    assert f"must answer at 127.0.0.1:{closed}, got: Connection refused" in said
    assert f"must answer at 127.0.0.1:{port}, got:" in said and "\n" not in said


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRouter]:
    router = VllmRouter(RouterSpec(run_key=KEY, log_path=str(tmp_path_factory.mktemp("router") / "log")))
    try:
        router.start()
        router.wait_ready()
        yield router
    finally:
        router.stop()


def test_the_router_must_have_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: VllmRouter
) -> None:
    at = ("--vllm-router-ip", "127.0.0.1", "--vllm-router-port", str(router.spec.port))
    c = parse_config(argv(tmp_path, *at))
    monkeypatch.setenv("VIME_RUN_KEY", KEY)
    backend_for(c).require_reachable(c)
    monkeypatch.setenv("VIME_RUN_KEY", "0" * 64)
    with pytest.raises(ValueError, match="must take the key in VIME_RUN_KEY, got: .*HTTP 401"):
        backend_for(c).require_reachable(c)


def test_the_gateway_of_a_router_apart(tmp_path: Path, router: VllmRouter) -> None:
    """The gateway needs the key, forwards to that router, and ends alone."""
    spec = RouterSpec(
        run_key=KEY,
        log_path=str(tmp_path / "gateway"),
        port=router.spec.port,
        external=True,
        start_timeout_s=60,
    )
    gateway = ExternalRouter(spec)
    try:
        gateway.start()
        gateway.wait_ready()
        assert gateway.poll() is None and gateway.engines() == []
        assert accepts(gateway.spec.gateway_host, gateway.spec.gateway_port)
    finally:
        gateway.stop()
    assert not accepts(gateway.spec.gateway_host, gateway.spec.gateway_port) and router.poll() is None
