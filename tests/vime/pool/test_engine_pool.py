"""Tests the pool when engines die or return errors, with engines that fail on request and the real router."""

from __future__ import annotations

import errno
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from engine_double import DoubleServer

from slime.protocols import WeightUpdate
from vime.pool.control import ControlError
from vime.pool.router import RouterSpec
from vime.vllm.control import VllmControl
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec

KEY = "pool-key"
UPDATE = WeightUpdate(4, "disk", {"path": "weights-4.safetensors", "checksums": {"w": "abc"}})


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came"
        time.sleep(0.05)


def die(url: str, key: str = KEY) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        VllmControl(url, key)._post("/die", {})


class Trainer:
    """The source of the weights: `parts` of the next version, and `file`, which makes a restarted engine's file."""

    def __init__(self, file: Callable[[], WeightUpdate] | None) -> None:
        self.file = file or (lambda: UPDATE)
        self.parts: Callable[[dict[str, int]], Iterator[WeightUpdate]] = file_parts
        self.sending: Iterator[WeightUpdate] | None = None

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        self.sending = self.parts(receivers) if self.sending is None else self.sending
        part = next(self.sending, None)
        self.sending = self.sending if part else None
        return done(part)

    def weights_file(self) -> Future[WeightUpdate]:
        return done(self.file())


T = TypeVar("T")


def done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class Doubles:
    def __init__(
        self,
        root: Path,
        count: int,
        spawn: type[DoubleServer] = DoubleServer,
        waits: bool = False,
        weights_file: Callable[[], WeightUpdate] | None = None,
        **options: Any,
    ) -> None:
        self.root = root
        self.trainer = Trainer(weights_file)
        specs = [
            VllmSpec(
                model_path="",
                run_key=KEY,
                log_path=str(root / f"{i}.log"),
                weight_dir=str(root),
                start_timeout_s=30,
                index=i,
                waits=waits,
            )
            for i in range(count)
        ]
        router = RouterSpec(run_key=KEY, log_path=str(root / "router.log"))
        settings = {"health_check_interval_s": 0.5, "health_check_timeout_s": 5, **options}
        self.pool = VllmEnginePool(specs, router, spawn=spawn, source=self.trainer, **settings)

    def publish(self, parts: Callable[[dict[str, int]], Iterator[WeightUpdate]], version: int = 4) -> None:
        self.trainer.parts = parts
        self.pool.publish(version)

    def requests(self, index: int) -> list[str]:
        """Returns the control calls that the engine got, in order."""
        lines = (self.root / f"{index}.log.requests").read_text().splitlines()
        return [line for line in lines if not line.startswith("GET")]


@pytest.fixture
def doubles(tmp_path: Path) -> Iterator[Callable[..., Doubles]]:
    made: list[Doubles] = []

    def make(count: int, **options: Any) -> Doubles:
        made.append(Doubles(tmp_path, count, **options))
        made[-1].pool.start()
        return made[-1]

    yield make
    for one in made:
        one.pool.stop()


def file_parts(receivers: dict[str, int]) -> Iterator[WeightUpdate]:
    yield UPDATE


LOADED = [
    "POST /start_weight_update ",
    'POST /update_weights {"update_info": {"channel": "disk", "info": {"path": "weights-4.safetensors", '
    '"checksums": {"w": "abc"}}}}',
    'POST /finish_weight_update {"weight_version": "4"}',
    "POST /reset_prefix_cache ",
]


def test_an_update_pauses_loads_and_resumes_every_engine(doubles: Callable[..., Doubles]) -> None:
    two = doubles(2)
    two.publish(file_parts)
    for index, url in enumerate(two.pool.engine_urls):
        assert two.requests(index) == ["POST /pause ", *LOADED, "POST /resume "]
        assert VllmControl(url, KEY).weight_version() == 4
    assert sorted(two.pool._router.engines()) == sorted(two.pool.engine_urls)


def test_parts_are_made_for_the_servers_of_now(doubles: Callable[..., Doubles]) -> None:
    """A server that replaced another has another name, and is in no group that was made before."""
    told: list[dict[str, int]] = []

    def parts(receivers: dict[str, int]) -> Iterator[WeightUpdate]:
        told.append(receivers)
        return file_parts(receivers)

    two = doubles(2)
    two.publish(parts)
    first = two.pool.engine_urls[0]
    die(first)
    wait_for(lambda: len(two.pool.engine_urls) == 2 and first not in two.pool.engine_urls)
    two.publish(parts)
    assert told == [{"engine-0-1": 1, "engine-1-1": 1}, {"engine-0-2": 1, "engine-1-1": 1}]


def test_a_dead_engine_returns_elsewhere_with_the_last_weights(doubles: Callable[..., Doubles]) -> None:
    two = doubles(2)
    two.publish(file_parts)
    first, second = two.pool.engine_urls
    die(first)
    wait_for(lambda: len(two.pool.engine_urls) == 2 and first not in two.pool.engine_urls)
    assert two.requests(0)[-4:] == LOADED, "no pause: nothing could reach it before"
    assert VllmControl(two.pool.engine_urls[0], KEY).weight_version() == 4
    assert two.pool.engine_urls[1] == second
    assert sorted(two.pool._router.engines()) == sorted(two.pool.engine_urls)
    two.pool.check_health()


def test_an_update_goes_on_when_an_engine_is_dead(doubles: Callable[..., Doubles]) -> None:
    two = doubles(2, health_check_interval_s=1000)
    first = two.pool.engine_urls[0]
    die(first)
    two.publish(file_parts)
    assert two.requests(1) == ["POST /pause ", *LOADED, "POST /resume "]
    wait_for(lambda: len(two.pool.engine_urls) == 2 and first not in two.pool.engine_urls)
    assert VllmControl(two.pool.engine_urls[0], KEY).weight_version() == 4


def test_an_engine_that_refuses_weights_is_an_error(doubles: Callable[..., Doubles]) -> None:
    two = doubles(2)
    VllmControl(two.pool.engine_urls[1], KEY)._post("/refuse", "/update_weights")
    with pytest.raises(ControlError, match=r"must accept POST /update_weights, got HTTP 500: told to refuse"):
        two.publish(file_parts)


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.ECONNABORTED])
def test_an_engine_behind_a_cut_network_is_replaced(
    doubles: Callable[..., Doubles], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It answers after the cut, but may lack a part of the update. Other errors of its calls end the run."""
    cluster = doubles(1)
    (first,) = cluster.pool.engine_urls

    def fail() -> None:
        monkeypatch.undo()
        raise OSError(number, "the call failed")

    monkeypatch.setattr(cluster.pool._members[0], "start_weight_update", fail)
    ends = nullcontext() if number == errno.ENETUNREACH else pytest.raises(OSError, match="the call failed")
    with ends:
        cluster.publish(file_parts)
        wait_for(lambda: cluster.pool.engine_urls not in ([], [first]))


def test_an_engine_that_does_not_answer_is_replaced(doubles: Callable[..., Doubles]) -> None:
    one = doubles(1)
    url = one.pool.engine_urls[0]
    VllmControl(url, KEY)._post("/refuse", "/health")
    wait_for(lambda: one.pool.engine_urls not in ([], [url]))
    one.pool.check_health()


def test_an_engine_that_keeps_dying_is_given_up_with_its_log(doubles: Callable[..., Doubles]) -> None:
    one = doubles(1, max_restarts=1)
    url = one.pool.engine_urls[0]
    die(url)
    wait_for(lambda: one.pool.engine_urls not in ([], [url]))
    die(one.pool.engine_urls[0])

    def lost() -> bool:
        try:
            one.pool.check_health()
        except RuntimeError as error:
            assert "restarted 1 times" in str(error)
            assert "told to die" in str(error)
            return True
        return False

    wait_for(lost)


def test_sleep_holds_for_an_engine_that_restarts_meanwhile(doubles: Callable[..., Doubles]) -> None:
    one = doubles(1)
    one.publish(file_parts)
    one.pool.sleep()
    url = one.pool.engine_urls[0]
    die(url)
    wait_for(lambda: one.pool.engine_urls not in ([], [url]))
    assert one.requests(0)[-5:] == [*LOADED, "POST /pause "]
    one.pool.wake()
    assert one.requests(0)[-1] == "POST /resume "


def passing_parts(receivers: dict[str, int]) -> Iterator[WeightUpdate]:
    for number in (1, 2):
        yield WeightUpdate(5, "disk", {"part": number}, lasting=False)


IN_PARTS = [
    "POST /start_weight_update ",
    'POST /update_weights {"update_info": {"channel": "disk", "info": {"part": 1}}}',
    'POST /update_weights {"update_info": {"channel": "disk", "info": {"part": 2}}}',
    'POST /finish_weight_update {"weight_version": "5"}',
    "POST /reset_prefix_cache ",
]


@pytest.mark.slow
def test_an_engine_that_restarts_after_parts_gets_a_file(doubles: Callable[..., Doubles]) -> None:
    """The parts are gone by then, so the pool requests a file from the trainer."""
    asked: list[int] = []

    def weights_file() -> WeightUpdate:
        asked.append(1)
        return UPDATE

    two = doubles(2, weights_file=weights_file)
    two.publish(passing_parts, 5)
    assert [two.requests(i) for i in (0, 1)] == [["POST /pause ", *IN_PARTS, "POST /resume "]] * 2
    assert not asked
    first = two.pool.engine_urls[0]
    die(first)
    wait_for(lambda: len(two.pool.engine_urls) == 2 and first not in two.pool.engine_urls)
    assert two.requests(0)[-4:] == LOADED and asked == [1]


@pytest.mark.slow
def test_an_update_that_goes_by_while_the_file_is_made_counts(doubles: Callable[..., Doubles]) -> None:
    """The pool requests another file, because the first one would be a version behind."""
    files = [UPDATE, replace(UPDATE, version=6)]

    def weights_file() -> WeightUpdate:
        if len(files) == 2:
            two.publish(passing_parts, 5)
        return files.pop(0)

    two = doubles(2, weights_file=weights_file)
    two.publish(passing_parts, 5)
    first = two.pool.engine_urls[0]
    die(first)
    wait_for(lambda: len(two.pool.engine_urls) == 2 and first not in two.pool.engine_urls)
    assert VllmControl(two.pool.engine_urls[0], KEY).weight_version() == 6 and not files


def test_engines_that_drop_their_weights_serve_again_after_the_update(
    doubles: Callable[..., Doubles],
) -> None:
    """Memory for weights comes first, and memory for keys and values after the update."""
    one = doubles(1, frees_memory=True)
    one.pool.sleep()
    assert one.pool.wake()
    assert one.requests(0) == ["POST /sleep ", "POST /wake_up "]
    one.publish(passing_parts, 5)
    assert one.requests(0)[2:] == [*IN_PARTS, "POST /wake_up ", "POST /resume "]
    one.publish(passing_parts, 5)  # an update of engines that serve
    assert one.requests(0)[-7:] == ["POST /pause ", *IN_PARTS, "POST /resume "]


def test_no_engine_starts_or_goes_on_starting_while_the_trainer_has_the_memory(
    doubles: Callable[..., Doubles],
) -> None:
    """One engine dies before the trainer's turn and is still starting when it begins; the other dies during it."""
    late = threading.Event()

    def weights_file() -> WeightUpdate:
        late.set()
        return WeightUpdate(5, "disk", {"path": "whole"})

    two = doubles(2, frees_memory=True, weights_file=weights_file)
    two.publish(passing_parts, 5)
    first, second = two.pool.engine_urls
    engine = two.pool._members[0]
    die(first)
    wait_for(lambda: engine.starting)
    two.pool.sleep()
    assert engine.handle is not None and engine.handle.poll() is not None  # it has left the device
    die(second)
    time.sleep(1)  # the monitor checks several times
    assert not engine.starting and not late.is_set()
    assert engine.restarts == 0 and all(e.handle.poll() is not None for e in two.pool._members if e.handle)
    two.pool.wake()
    wait_for(lambda: len(two.pool.engine_urls) == 2 and not {first, second} & {*two.pool.engine_urls})


def test_a_dead_router_returns_at_its_address(doubles: Callable[..., Doubles], caplog: Any) -> None:
    one = doubles(1)
    url = one.pool.router_url
    psutil.Process(one.pool._router._process.pid).children()[0].kill()

    def serves() -> bool:
        try:
            return one.pool._router.engines() == one.pool.engine_urls
        except (OSError, RuntimeError):
            return False

    wait_for(serves)
    assert one.pool.router_url == url
    (line,) = [line for line in caplog.messages if "the router died" in line]
    assert line.startswith(
        "the router died and is restarted (exit status 137, from SIGKILL); its last log lines:"
    )


def test_a_pool_of_no_engines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--rollout-num-gpus"):
        VllmEnginePool([], RouterSpec(run_key=KEY, log_path=str(tmp_path / "r.log")))
