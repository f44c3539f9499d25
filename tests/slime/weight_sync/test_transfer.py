"""Tests the states of engines during updates, sleep and failures. tests/vime/pool/test_engine_pool.py has real
servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from slime.protocols import WeightSet, WeightUpdate
from slime.weight_sync.delta.refusals import new_file, refuse
from slime.weight_sync.registry import CHANNELS, default_channel
from slime.weight_sync.transfer import Engine, State, WeightTransfer


class OneEngine:
    """An engine, its pool and its trainer in one object. It records every call, and the calls in `fails` fail."""

    name, workers = "engine", 2

    def __init__(self, frees_memory: bool = False, fails: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.made = 0
        self.transfer = WeightTransfer(self, self, frees_memory=frees_memory)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.calls.append(name)
            if name in self.fails:
                raise RuntimeError(f"told to fail at {name}")

        return call

    def update_weights(self, message: dict[str, Any]) -> None:
        assert message["channel"] == "disk"
        assert self.made == (message["info"]["part"] + 1) % 3, (
            "the next part is made while this one is loaded"
        )
        self.calls.append(f"part {message['info']['part']}")

    def serving(self) -> list[Engine]:
        return [self]

    def on_serving(self, act: Callable[[Engine], None]) -> None:
        act(self)

    def next_weights(self, version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        assert receivers == {"engine": 2}
        self.made = (self.made + 1) % 3
        future: Future[WeightUpdate | None] = Future()
        future.set_result(
            WeightUpdate(version, "disk", {"part": self.made}, lasting=False) if self.made else None
        )
        return future

    def take_calls(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


PHASES = ("wait", "pause", "load", "finish")
PARTS = ["start_weight_update", "part 1", "part 2", "finish_weight_update", "reset_prefix_cache"]


def test_an_update_pauses_and_resumes_engines_that_serve() -> None:
    one = OneEngine()
    one.transfer.publish(1)
    assert one.take_calls() == ["pause", *PARTS, "resume"] and one.transfer.state is State.SERVING


def test_an_update_tells_what_its_time_is_made_of() -> None:
    """Each part is the time of the calls that it measures, and an update that failed before adds nothing."""
    one = OneEngine(fails=("finish_weight_update",))
    slow = {"pause": 0.05, "start_weight_update": 0.02, "update_weights": 0.04, "reset_prefix_cache": 0.03}
    slow |= {"resume": 0.02, "next_weights": 0.01}

    def slowly(name: str) -> Callable[..., Any]:
        call = getattr(one, name)

        def called(*args: Any) -> Any:
            time.sleep(slow[name])
            return call(*args)

        return called

    for name in slow:
        setattr(one, name, slowly(name))
    with pytest.raises(RuntimeError, match="told to fail"):
        one.transfer.publish(1)
    assert not any(name.endswith("_time") for name in one.transfer.figures)
    one.fails = ()
    began = time.perf_counter()
    one.transfer.publish(1)
    whole = time.perf_counter() - began
    found = {name: one.transfer.figures[f"perf/update_weights_{name}_time"] for name in PHASES}
    least = {"wait": 0, "pause": 0.07, "load": 0.08, "finish": 0.05}  # two parts
    assert all(found[name] >= least[name] for name in PHASES), found
    assert sum(found.values()) < whole - 3 * slow["next_weights"]


def test_engines_without_weights_serve_after_the_update_alone() -> None:
    one = OneEngine(frees_memory=True)
    one.transfer.sleep()
    assert one.transfer.state is State.ASLEEP and one.transfer.is_trainers_turn
    assert one.transfer.wake() and one.transfer.state is State.EMPTY
    assert one.take_calls() == ["stop_starting", "free_memory", "take_weight_memory"]
    one.transfer.publish(1)
    assert one.take_calls() == [*PARTS, "take_cache_memory", "resume"]
    assert one.transfer.state is State.SERVING


def test_engines_that_start_without_weights_wait_for_an_update() -> None:
    one = OneEngine()
    one.transfer.hold(one)
    assert one.take_calls() == ["pause"] and one.transfer.state is State.PAUSED
    one.transfer.join(one, lambda: one.calls.append("admitted"))  # its server had ended
    assert one.take_calls() == ["pause", "admitted"]
    one.transfer.sleep()
    assert one.transfer.wake() and one.transfer.state is State.PAUSED
    one.transfer.publish(1)
    assert one.take_calls()[-len(PARTS) - 1 :] == [*PARTS, "resume"] and one.transfer.state is State.SERVING


def test_engines_that_keep_their_weights_serve_when_they_wake() -> None:
    one = OneEngine()
    one.transfer.sleep()
    assert one.transfer.state is State.ASLEEP and not one.transfer.is_trainers_turn
    assert not one.transfer.wake() and one.transfer.state is State.SERVING
    assert one.take_calls() == ["pause", "resume"]


def test_weights_are_not_published_to_sleeping_engines() -> None:
    one = OneEngine(frees_memory=True)
    one.transfer.sleep()
    with pytest.raises(RuntimeError, match="must be published to engines that are awake"):
        one.transfer.publish(1)
    assert one.transfer.state is State.ASLEEP


@pytest.mark.parametrize("step", ["start_weight_update", "finish_weight_update", "reset_prefix_cache"])
@pytest.mark.parametrize("empty", [False, True])
def test_nothing_serves_after_an_update_that_failed(step: str, empty: bool) -> None:
    one = OneEngine(frees_memory=empty, fails=(step,))
    if empty:
        one.transfer.sleep()
        one.transfer.wake()
    with pytest.raises(RuntimeError, match=f"told to fail at {step}"):
        one.transfer.publish(1)
    assert "resume" not in one.take_calls()
    assert one.transfer.state is (State.EMPTY if empty else State.PAUSED)


@pytest.mark.parametrize("frees", [False, True])
def test_engines_that_sleep_in_the_middle_of_an_update_serve_after_the_next_one(frees: bool) -> None:
    """The trainer was lost in the update, and needs the devices for its restart."""
    one = OneEngine(frees_memory=frees, fails=("finish_weight_update",))
    if frees:
        one.transfer.sleep()
        one.transfer.wake()
    with pytest.raises(RuntimeError, match="told to fail"):
        one.transfer.publish(1)
    one.fails = ()
    one.take_calls()
    one.made = 0
    one.transfer.sleep()
    assert one.transfer.wake() and one.transfer.state is (State.EMPTY if frees else State.PAUSED)
    freed = ["take_cache_memory", "stop_starting", "free_memory", "take_weight_memory"]
    assert one.take_calls() == (freed if frees else ["pause"])
    one.transfer.publish(1)
    assert one.take_calls()[-1] == "resume" and one.transfer.state is State.SERVING


def test_each_channel_has_its_name_and_a_default_exists_for_each_machine() -> None:
    assert {name: channel.load().name for name, channel in CHANNELS.items()} == {n: n for n in CHANNELS}
    assert [default_channel(gpus) for gpus in ("shared", "apart", None)] == ["ipc", "nccl", "disk"]


def test_a_refused_delta_is_followed_by_the_whole_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Delta and whole set belong to one update: the engine stays paused, and no call fails."""
    one = OneEngine()
    said = new_file(tmp_path)
    delta = WeightSet("delta", 3, settings={"refusals": str(said)})
    whole = WeightSet("full", settings={"chain": "a", "version": 4})
    coming = [
        WeightUpdate(4, "disk", {"part": 1}, lasting=False, weights=delta, size_bytes=5, density=0.1),
        None,
        WeightUpdate(4, "disk", {"part": 2}, weights=whole, size_bytes=40),
        WeightUpdate(4, "disk", {"part": 3}, weights=whole, size_bytes=2),
        None,
    ]

    def next_weights(version: int, receivers: dict[str, int]) -> Future[WeightUpdate | None]:
        future: Future[WeightUpdate | None] = Future()
        future.set_result(coming.pop(0))
        return future

    def update_weights(message: dict[str, Any]) -> None:
        one.calls.append(f"{message['weights']['kind']} {message['info']['part']}")
        if message["weights"]["kind"] == "delta":
            refuse(str(said), "engine: version 3\nis not here")

    one.next_weights, one.update_weights = next_weights, update_weights  # type: ignore[method-assign]
    one.transfer.publish(4)
    start, *_, finish, reset = PARTS
    assert one.take_calls() == ["pause", start, "delta 1", "full 2", "full 3", finish, reset, "resume"]
    assert "the whole set of weights is sent instead of a delta: engine: version 3 is not here" in caplog.text
    sizes = {"perf/update_weights_wire_bytes": 42, "perf/update_weights_density": 1.0}
    times = {f"perf/update_weights_{name}_time" for name in PHASES}
    assert one.transfer.figures.keys() == sizes.keys() | times and not coming
    assert sizes.items() <= one.transfer.figures.items()
    assert one.transfer._last is not None and one.transfer._last.lasting
