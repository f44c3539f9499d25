"""Engines join and leave a pool, through the control socket that `vime engines` uses: engines that fail on request,
the real router, and placement without Ray. tests/slime/cluster has Ray's placement; tests/e2e has a whole run."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from config_cases import good_argv
from engine_double import DoubleServer
from test_engine_pool import KEY, LOADED, Trainer, die, file_parts, wait_for

from slime.cluster.placement import Node, Placement
from slime.tracking.events import Events
from vime.backends import parse_config
from vime.members import command
from vime.members.control_socket import ControlSocket
from vime.members.table import read_engines, table
from vime.pool.asgi import KEY_VARIABLE
from vime.pool.control import request
from vime.pool.engine_slots import EngineSlot, EngineSlots
from vime.pool.process import free_port
from vime.pool.router import RouterSpec
from vime.vllm.control import GAUGES, VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec


class Run:
    """A pool of doubles with three slots (`count` slots have an engine), and its control socket."""

    def __init__(self, root: Path, count: int, argv: list[str], **options: object) -> None:
        self.root, self.told, self.trainer = root, [], Trainer(None)
        self.config = parse_config(argv)
        placed = Placement(None, "CPU", [], {}, 1.0, [Node("here", "127.0.0.1")] * 3)  # type: ignore[arg-type]

        def spec_of(index: int) -> VllmSpec:
            return VllmSpec(
                model_path="",
                run_key=KEY * 4,
                log_path=str(root / "logs" / f"engine-{index}.log"),
                weight_dir=str(root),
                start_timeout_s=60,
                index=index,
            )

        self.slots = EngineSlots(self.config, "policy", spec_of, DoubleServer, VllmControl, False, False)
        specs = [self.slots.add(EngineSlot(placed, [i])) for i in range(count)]
        self.slots.free = [EngineSlot(placed, [i]) for i in range(count, 3)]
        router = RouterSpec(run_key=KEY * 4, log_path=str(root / "logs" / "router.log"))
        self.pool = VllmEnginePool(
            specs,
            router,
            spawn=self.slots.spawn,
            slots=self.slots,
            events=Events("engines", str(root)),
            source=self.trainer,
            health_check_interval_s=0.5,
            health_check_timeout_s=20,
            **options,
        )
        self.control = ControlSocket(str(root), {"policy": self.pool}, self.told.append)
        self.pool.start()
        self.control.start()

    def publish(self) -> None:
        self.trainer.parts = file_parts
        self.pool.publish(4)

    def url(self, index: int) -> str:
        (found,) = [m.control.url for m in self.pool._members if m.spec.index == index]
        return found

    def answer(self, index: int, path: str, text: str) -> None:
        request(self.url(index), KEY * 4, "POST", "/answer", {"path": path, "text": text}, timeout_s=20)

    def requests(self, index: int) -> list[str]:
        lines = (self.root / "logs" / f"engine-{index}.log.requests").read_text().splitlines()
        return [line for line in lines if not line.startswith("GET") and "/answer" not in line]

    def shown(self) -> list[list[str]]:
        fleet = read_engines(self.root)
        return [[e.name, e.state, str(e.version)] for e in fleet.engines.values()]

    def stop(self) -> None:
        self.control.close()
        self.pool.stop()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []
    monkeypatch.setenv(KEY_VARIABLE, KEY * 4)
    argv = [*good_argv(tmp_path), "--rollout-num-gpus", "1", "--update-weight-transport", "disk"]
    argv.remove("--colocate")

    def make(count: int, **options: object) -> Run:
        made.append(Run(tmp_path / "run", count, argv, **options))
        return made[-1]

    yield make
    for run in made:
        run.stop()


def metrics_page(running: int, waiting: int, kv_cache: float = 0.25) -> str:
    """Returns vLLM's /metrics page with these numbers."""
    values = zip(GAUGES, (running, waiting, kv_cache), strict=True)
    return "".join(f'{name}{{engine="0",model_name="m"}} {value:.3f}\n' for name, value in values)


def ask(run: Run, *argv: str) -> int:
    return command.main([argv[0], str(run.root), *argv[1:]])


def test_an_engine_joins_with_the_present_weights_and_another_leaves(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(1)
    run.publish()
    first = run.url(0)
    assert ask(run, "add") == 0
    assert "engine-1 joined; a run that resumes has its configured engines alone" in capsys.readouterr().out
    assert run.requests(1) == LOADED and VllmControl(run.url(1), KEY * 4).weight_version() == 4
    assert sorted(run.pool._router.engines()) == sorted([first, run.url(1)])
    assert run.told == [2] and run.shown() == [["engine-0", "serving", "4"], ["engine-1", "serving", "4"]]

    run.answer(0, "/metrics", metrics_page(2, 1))
    found: list[int] = []
    leaving = threading.Thread(target=lambda: found.append(ask(run, "remove", "engine-0")))
    leaving.start()
    wait_for(lambda: run.shown()[0][1] == "leaving", 60)
    assert run.pool._router.engines() == [run.url(1)], "no new requests"
    run.publish()  # it has requests, so it takes part
    assert (
        run.requests(0)[-2:] == ["POST /reset_prefix_cache ", "POST /resume "]
        and run.requests(0).count(LOADED[2]) == 2
    )
    assert found == [] and run.pool._members[0].handle.poll() is None
    wait_for(lambda: read_engines(run.root).engines["engine-0"].running == 2, 60)
    assert (
        read_engines(run.root).engines["engine-0"].waiting,
        read_engines(run.root).engines["engine-0"].kv_cache,
    ) == (1, 0.25)
    run.answer(0, "/metrics", metrics_page(0, 0))
    leaving.join(60)
    assert found == [0] and "its devices are free" in capsys.readouterr().out
    assert [m.title for m in run.pool._members] == ["engine-1"] and run.told == [2, 1]
    assert run.shown() == [["engine-0", "removed", "4"], ["engine-1", "serving", "4"]]
    assert ask(run, "add") == 0  # it takes the slot of engine-0, or the third slot
    assert [m.title for m in run.pool._members] == ["engine-1", "engine-2"] and run.told[-1] == 2
    assert len(run.slots.free) == 1


@pytest.mark.slow
def test_engines_that_joined_are_supervised_and_end_with_the_run(start: Callable[..., Run]) -> None:
    run = start(1)
    run.publish()
    assert ask(run, "add", "--count", "2") == 0
    assert run.told[-1] == 3 and run.slots.free == []
    died = run.url(2)
    die(died, KEY * 4)
    wait_for(lambda: run.url(2) != died and ["engine-2", "serving", "4"] in run.shown(), 120)
    run.stop()
    ended = table(read_engines(run.root), ended=True)
    assert [line.split()[2] for line in ended[1:]] == ["ended"] * 3
    with pytest.raises(ValueError, match="must belong to a running run, got .* whose run has ended"):
        ask(run, "add")


def test_requests_that_are_left_end_elsewhere(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(2)
    run.answer(1, "/metrics", metrics_page(3, 0))
    assert ask(run, "remove", run.url(1).removeprefix("http://"), "--wait-s", "0.1") == 0
    assert "has left after 0.1 s; 3 requests begin again elsewhere" in capsys.readouterr().out
    with pytest.raises(ValueError, match="ENGINE must be one of engine-0 at .*, got engine-1"):
        ask(run, "remove", "engine-1")
    with pytest.raises(ValueError, match="must keep one engine that serves, got engine-0, the last one"):
        ask(run, "remove", "engine-0")


def test_what_may_not_join(
    start: Callable[..., Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error leaves the run unchanged."""
    run = start(1)
    run.publish()
    assert os.stat(run.control.path.parent).st_mode & 0o777 == 0o700
    for sent in (b"", b"no json\n", b'{"do": "dance"}\n', b"[]\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(run.control.path))
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.makefile().read()
        assert (answer == "") == (sent == b"") and answer.count("\n") <= 1
    run.control._is_started = False
    with pytest.raises(ValueError, match="must serve before its engines change"):
        ask(run, "add")
    run.control.start()
    monkeypatch.setattr("vime.pool.engine_slots.reserve_engine", no_place)
    with pytest.raises(ValueError, match="2 devices must be free"):
        ask(run, "add", "--count", "3")  # there are two free slots
    assert len(run.slots.free) == 2
    with pytest.raises(ValueError, match="--model must be one of policy, got judge"):
        ask(run, "add", "--model", "judge")
    for argv, said in (
        (["--count", "0"], "--count must be at least 1, got 0"),
        (["--address", "here"], "--address must be HOST:PORT, got here"),
        (["--address", run.url(0)], "which is in the run"),
        (
            ["--address", f"127.0.0.1:{free_port('127.0.0.1')}"],
            "must answer at 127.0.0.1:.*Connection refused",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            ask(run, "add", *argv)
    monkeypatch.setattr(DoubleServer, "command", lambda self: ["false"])
    assert ask(run, "add") == 1
    assert "engine-1 did not join: the engine server at" in capsys.readouterr().out
    assert [m.title for m in run.pool._members] == ["engine-0"] and len(run.slots.free) == 2
    assert run.shown()[1][:2] == ["engine-1", "failed"]
    run.slots.colocated = True
    with pytest.raises(ValueError, match="got --colocate"):
        ask(run, "add")
    run.pool.check_health()
    assert run.pool._router.engines() == [run.url(0)]


def no_place(*args: object) -> None:
    raise ValueError("2 devices must be free within 10 s, got only 0 of 2 CPUs")


def test_an_engine_that_was_started_apart_joins_and_outlives_the_run(
    start: Callable[..., Run],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    run = start(1)
    run.publish()
    apart = DoubleServer(
        VllmSpec(model_path="", run_key=KEY * 4, log_path=str(tmp_path / "apart.log"), weight_dir="")
    )
    apart.start()
    try:
        apart.wait_ready()
        url, address = apart.spec.url, apart.spec.url.removeprefix("http://")

        def serves(model: str) -> None:
            text = json.dumps({"data": [{"root": model}]})
            request(url, KEY * 4, "POST", "/answer", {"path": "/v1/models", "text": text}, timeout_s=20)

        with pytest.raises(ValueError, match="must say which model it serves"):
            ask(run, "add", "--address", address)
        serves("/elsewhere/other-model")
        with pytest.raises(
            ValueError, match="must serve the model of this run, .*, got /elsewhere/other-model"
        ):
            ask(run, "add", "--address", address)
        serves(run.config.rollout.hf_checkpoint)
        with monkeypatch.context() as patch:
            patch.setenv(KEY_VARIABLE, "0" * 32)
            with pytest.raises(ValueError, match="must take the key in VIME_RUN_KEY"):
                ask(run, "add", "--address", address)
            patch.delenv(KEY_VARIABLE)
            with pytest.raises(
                ValueError, match="VIME_RUN_KEY must be set for a run that adds an external engine"
            ):
                ask(run, "add", "--address", address)
        assert ask(run, "add", "--address", address) == 0
        assert sorted(run.pool._router.engines()) == sorted([run.url(0), url])
        assert VllmControl(url, KEY * 4).weight_version() == 4
        assert read_engines(run.root).engines["engine-1"].location == "external, at 127.0.0.1"
        capsys.readouterr()
        assert ask(run, "remove", address) == 0
        assert "the external server keeps running" in capsys.readouterr().out
        assert apart.poll() is None and run.pool._router.engines() == [run.url(0)]
    finally:
        apart.stop()
