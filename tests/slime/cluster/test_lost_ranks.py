"""Which errors of trainer ranks a restart may repair, and the end of a rank that a signal has stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from local_ray import local_ray

from slime.cluster.calls import DIED, ActorError
from slime.cluster.faults import lost
from slime.cluster.faults.lost import AnswerWatch, RankLost, find_dead, is_loss
from slime.cluster.watchdog import is_running

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms"


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        (GLOO, True),
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711",
            True,
        ),
        (
            "DistBackendError: NCCL error in: NCCLUtils.cpp:93, remote process exited or there was a network error",
            True,
        ),
        ("DistStoreError: wait timeout after 600000ms, keys: /default_pg/0", True),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", True),
        ("DivergedError: gradients must be finite, got norm nan in step 0 of rollout 3", False),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; NCCL uses 1.2 GiB", False),
        ("ValueError: --lr must be above 0, got -1", False),
        ("KeyError: 'answer'", False),
    ],
)
def test_only_lost_processes_and_connections_are_losses(reason: str, wanted: bool) -> None:
    assert is_loss(ActorError("trainer-1", reason, Path("trainer-1.log"))) is wanted


def test_a_process_that_was_killed_for_memory_is_no_loss() -> None:
    log = Path("trainer-0.log")
    assert is_loss(ActorError("trainer-0", DIED, log, "The worker died unexpectedly", died=True))
    details = "The actor was killed because the node was running low on memory"
    assert not is_loss(ActorError("trainer-0", DIED, log, details, died=True))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=1):
        yield


@ray.remote(num_cpus=0, concurrency_groups={"life": 1})
class TrainerActor:
    def answer(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        time.sleep(600)


def test_a_stopped_rank_is_found_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lost, "_ASK_EVERY_S", 0.1)
    actor = TrainerActor.remote()
    liveness = {actor.live.remote(): "trainer-0"}
    watch = AnswerWatch({"trainer-0": actor}, 1.0)
    _, pid = ray.get(actor.answer.remote())
    assert watch.find_silent() is None
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    while (silent := watch.find_silent()) is None:
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    assert silent == "trainer-0" and time.monotonic() - began > 0.5
    assert find_dead(liveness, tmp_path) is None  # the process exists
    process = psutil.Process(pid)
    watch.end(20.0)
    assert not is_running(process)
    ray.wait(list(liveness), timeout=20)
    dead = find_dead(liveness, tmp_path)
    assert dead is not None and dead.died
    assert RankLost("trainer-3", "closed by peer [::1]:47", tmp_path).cause == "closed by peer [::#]:#"
    assert str(dead).startswith("trainer-0 failed: its process died")
