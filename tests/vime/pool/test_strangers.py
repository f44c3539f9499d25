"""The run's key goes to no server of another user, for every request and whenever that user takes the port."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from engine_double import DoubleServer
from stranger import UID, Stranger, only_as_root, stranger

from slime.cluster.ray_token import require_own_server
from slime.peers import http, listeners, proof
from slime.peers.proof import NotProvenError
from vime.pool import external
from vime.pool.control import answers, request
from vime.pool.process import Server, free_port
from vime.pool.router import RouterSpec
from vime.sglang.router import SglangRouter
from vime.sglang.server import SglangServer, SglangSpec
from vime.vllm.client import VllmEngineClient
from vime.vllm.control import VllmControl
from vime.vllm.external_router import ExternalRouter
from vime.vllm.router import VllmRouter
from vime.vllm.server import VllmServer, VllmSpec

KEY = secrets.token_hex(32)
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_warned", set())


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Stranger]:
    with stranger(tmp_path) as one:
        yield one


def spec(kind: type, folder: Path, port: int = 0, **more: Any) -> Any:
    known = {"run_key": KEY, "log_path": str(folder / "server.log"), "port": port, **more}
    return kind(**known) if kind is RouterSpec else kind(model_path="", weight_dir=str(folder), **known)


@only_as_root
@pytest.mark.parametrize(
    ("server", "specs"),
    [
        (VllmServer, VllmSpec),
        (SglangServer, SglangSpec),
        (VllmRouter, RouterSpec),
        (SglangRouter, RouterSpec),
    ],
)
def test_who_takes_a_port_while_its_server_starts_gets_no_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    server: type[Server[Any]],
    specs: type,
) -> None:
    """The port is in the command line long before the server listens. The stranger answers 200 to all requests."""
    monkeypatch.setattr(server, "command", lambda self: SLEEPS)
    one = server(spec(specs, tmp_path, start_timeout_s=0.5))
    try:
        one.start()
        with stranger(tmp_path, one.spec.port) as other, caplog.at_level(logging.WARNING):
            with pytest.raises(RuntimeError, match="must become healthy within"):
                one.wait_ready()
            assert "GET /vime_proof" in other.heard and KEY not in other.heard
    finally:
        one.stop()
    said = [line for line in caplog.messages if f"127.0.0.1:{one.spec.port}" in line]
    assert (
        len(said) == 1 and f"got a process of user {UID} without the run's key, which was not sent" in said[0]
    )


@only_as_root
def test_a_server_that_a_stranger_was_in_the_way_of_serves_later(tmp_path: Path) -> None:
    """Once the server runs, no other process gets its port, not even after its end."""
    one = DoubleServer(spec(VllmSpec, tmp_path, start_timeout_s=60))
    try:
        one.choose_port()
        port = one.spec.port
        with stranger(tmp_path, port) as other, pytest.raises(ValueError, match="must be free"):
            one.start()
        one.start()
        one.wait_ready()
        for _ in range(2):
            with pytest.raises(OSError, match="in use"), stranger(tmp_path, port):
                pass
            one.stop()
        assert KEY not in other.heard and not answers(one.spec.url, KEY, "/health", timeout_s=5)
    finally:
        one.stop()


@only_as_root
def test_the_ports_of_a_router_that_died_stay_the_runs(tmp_path: Path) -> None:
    router = VllmRouter(spec(RouterSpec, tmp_path))
    try:
        router.start()
        router.wait_ready()
        router.stop()
        for port in (router.spec.port, router.spec.gateway_port):
            with pytest.raises(OSError, match="in use"), stranger(tmp_path, port):
                pass
        router.start()  # at the same addresses
        router.wait_ready()
        assert router.engines() == []
    finally:
        router.stop()


@only_as_root
def test_servers_apart_that_a_stranger_replaced(
    taken: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = spec(VllmSpec, tmp_path, taken.port, start_timeout_s=0.2)
    engine = external.ExternalEngine(at, VllmControl)
    with pytest.raises(RuntimeError, match="must serve within"):
        engine.wait_ready()
    assert engine.poll() == 1 and KEY not in taken.heard
    control = VllmControl(at.url, KEY)
    assert not control.is_healthy(5)
    for call in (control.pause, control.weight_version, control.load, control.model):
        with pytest.raises(NotProvenError):
            call()
    router = ExternalRouter(spec(RouterSpec, tmp_path, taken.port, external=True))
    monkeypatch.setattr(Server, "poll", lambda self: None)  # as if its gateway ran
    assert router.poll() == 1
    with pytest.raises(NotProvenError):
        router.add("http://127.0.0.1:1")
    assert KEY not in taken.heard


@only_as_root
def test_servers_apart_are_strangers_until_they_prove_themselves(
    taken: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIME_RUN_KEY", KEY)
    address = f"127.0.0.1:{taken.port}"
    rollout = SimpleNamespace(rollout_external_engine_addrs=[address])
    engine = SimpleNamespace(router_ip="127.0.0.1", router_port=taken.port)
    update = SimpleNamespace(update_weight_transport="disk")
    config: Any = SimpleNamespace(
        rollout=rollout,
        engine=engine,
        num_engines=1,
        weight_update=update,
        cluster=SimpleNamespace(colocate=False),
    )
    with pytest.raises(ValueError) as error:
        external.require_reachable(config)
    assert str(error.value).count("must be started with the key in VIME_RUN_KEY, got: the server at") == 2
    with pytest.raises(ValueError, match=f"must be started with the key .* a process of user {UID}"):
        external.require_joinable(config, f"http://{address}", trained=True)
    assert KEY not in taken.heard


@only_as_root
def test_rollouts_and_hooks_send_no_key_to_a_stranger(taken: Stranger) -> None:
    url = f"http://127.0.0.1:{taken.port}"

    async def ask() -> None:
        client = VllmEngineClient(url, KEY, held=True)
        with pytest.raises(TimeoutError, match="must prove that it is this run's"):
            await client.generate([1, 2], {"max_new_tokens": 1}, seed=0, deadline_s=0.5)
        with pytest.raises((aiohttp.ClientError, OSError)):
            await client.abort_all()
        await client.close()
        http.set_own_servers(http.OwnServers([url], {"Authorization": f"Bearer {KEY}"}, held=True))
        for more in ({}, {"headers": {"Authorization": f"Bearer {KEY}"}}):
            with pytest.raises(TimeoutError, match="must prove that it is this run's"):
                await http.post(url + "/generate", {}, deadline_s=0.3, **more)
        listed = http.OwnServers([], {"Authorization": f"Bearer {KEY}"}, url + "/list_workers", "/secret")
        http.set_own_servers(listed)
        with pytest.raises(TimeoutError):
            await http.post("http://127.0.0.1:1/secret/x", {}, deadline_s=0.3)

    try:
        asyncio.run(ask())
    finally:
        http.set_own_servers()
    assert "vime_proof" in taken.heard and KEY not in taken.heard


@only_as_root
def test_rays_token_goes_to_no_stranger(taken: Stranger) -> None:
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(
            ValueError, match=f"must belong to this user or root, got a process of user {UID}"
        ):
            require_own_server(f"{host}:{taken.port}")
    require_own_server("192.0.2.1:6379")  # an address of documentation (RFC 5737), on no host
    assert not proof.is_strangers("localhost", free_port("127.0.0.1"), KEY)
    assert proof.is_strangers("localhost", taken.port, KEY) and KEY not in taken.heard


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoubleServer]:
    one = DoubleServer(spec(VllmSpec, tmp_path_factory.mktemp("double"), start_timeout_s=60))
    try:
        one.start()
        one.wait_ready()
        yield one
    finally:
        one.stop()


@only_as_root
def test_a_proof_cannot_be_passed_on(double: DoubleServer, tmp_path: Path) -> None:
    """The stranger forwards the challenge to a server of the run, which proves another address."""
    with stranger(tmp_path, relayed=double.spec.port) as other:
        assert not answers(f"http://127.0.0.1:{other.port}", KEY, "/health", timeout_s=5)
        assert "vime_proof" in other.heard and KEY not in other.heard


@only_as_root
def test_only_a_listener_that_was_there_before_the_connection_is_trusted(
    taken: Stranger, double: DoubleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger accepted the connection and left the port to a server of this user."""
    (own,) = listeners.listening_at("127.0.0.1", double.spec.port)
    now = replace(own, port=taken.port)
    monkeypatch.setattr(proof, "listening_at", lambda host, port: [now])
    with pytest.raises(NotProvenError):
        request(f"http://127.0.0.1:{taken.port}", KEY, "GET", "/health", timeout_s=5)
    assert KEY not in taken.heard


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the listener look like one on another host, whose sockets this kernel does not list."""
    monkeypatch.setattr(proof, "listening_at", lambda host, port: [])


def test_an_engine_on_another_host_proves_itself(double: DoubleServer, far: None) -> None:
    url = double.spec.url
    assert VllmControl(url, KEY).is_healthy(5)
    assert not answers(url, "0" * 64, "/health", timeout_s=5)
    with pytest.raises(NotProvenError, match="got a port that was closed without the run's key"):
        request(url, "0" * 64, "POST", "/pause", timeout_s=5)


def test_the_gateway_proves_itself_and_asks_for_the_key_first(tmp_path: Path, far: None) -> None:
    """The gateway is in front of a separately started router, which cannot prove itself."""
    router = VllmRouter(spec(RouterSpec, tmp_path, gateway_port=free_port("127.0.0.1")))
    ready: Callable[[], bool] = lambda: answers(router.spec.gateway_url, KEY, "/workers", timeout_s=5)  # noqa: E731
    try:
        router.start()
        end = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < end, router.tail_log()
            time.sleep(0.1)
        assert not router.is_ready()
        for asked in ("", "?challenge=12", f"?challenge={'x' * 64}"):
            with pytest.raises(RuntimeError, match="HTTP 400"):
                request(router.spec.gateway_url, "", "GET", f"/vime_proof{asked}", timeout_s=5)
        with pytest.raises(RuntimeError, match="HTTP 401"):
            request(router.spec.gateway_url, "", "POST", "/vime_proof", timeout_s=5)
    finally:
        router.stop()


def test_a_server_that_sends_for_ever_is_given_up(far: None) -> None:
    """The request ends in time, and after few bytes."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            for _ in range(2):
                server.accept()
            held = server.accept()[0]
            with held:
                try:
                    while True:
                        held.sendall(b"HTTP/1.1 200 OK\r\n")
                        time.sleep(0.01)
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        for _ in range(2):
            assert not answers(f"http://127.0.0.1:{server.getsockname()[1]}", KEY, "/health", timeout_s=0.5)
        assert time.monotonic() - began < 5


def test_the_kernels_two_lists_of_listeners_agree() -> None:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::", 0), family=socket.AF_INET6) as two,
    ):
        for server, host in ((one, "127.0.0.1"), (two, "::")):
            port = server.getsockname()[1]
            (found,) = listeners.listeners(port)
            table = [*listeners._read("/proc/net/tcp"), *listeners._read("/proc/net/tcp6")]
            assert [each for each in table if each.port == port] == [found] and found.host == host
            assert listeners.listening_at("127.0.0.1", port) == [found]
        assert listeners.listening_at("127.0.0.2", one.getsockname()[1]) == []
