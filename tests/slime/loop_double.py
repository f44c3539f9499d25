"""A run of the loop with small implementations of its three protocols, which record every call."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from slime import loop
from slime.checkpoints.memory_files import StoredState
from slime.config import Config
from slime.protocols import Evaluated, RecoveryPoint, RolloutBatch, TrainResult
from slime.tracking.console import StepLine
from slime.tracking.report import Reporter
from slime.tracking.trackers import Trackers


def done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class LoopRun:
    """Records one run's calls in order, as words: "generate 0", "train 0", "publish 1", ..."""

    data_bytes = 1000

    def __init__(self, start: int = 0, **flags: Any) -> None:
        defaults = {
            "num_rollout": 2,
            "max_staleness": 0,
            "colocate": False,
            "update_weights_interval": 1,
            "eval_interval": None,
            "skip_eval_before_train": False,
            "save": None,
            "save_interval": None,
            "async_save": False,
            "recover_from": "disk",
            "max_trainer_restarts": 3,
            "run_dir": None,
            "exit_signal_handler": False,
            "start_rollout_id": None,
            "num_steps_per_rollout": 1,
            "actor_num_gpus_per_node": 1,
            "rollout_num_gpus": 1,
            "profile_steps": None,
        }
        assert set(flags) <= set(defaults)
        self.config = Config.from_flat({**defaults, **flags})
        self.start_rollout_id = start
        self.drops_weights = False
        self.stop, self.stops_in = threading.Event(), -1
        self.held_out: list[object] | None = None
        self.calls: list[str] = []
        self.logged: list[tuple] = []
        self.metrics: list[Any] = []
        self.version: int | None = None  # version of the weights in the engines
        self.generated_with: list[int | None] = []
        self.with_checkpoint: list[int] = []  # rollouts that a checkpoint follows, as the manager gets them
        self.faults: dict[str, list[Exception]] = {}  # call -> the errors that its next calls raise
        self.weights = start  # rollouts that the trainer's weights have seen
        self.report = Reporter(self.config, Trackers([self]), StepLine(stream=io.StringIO()))

    def go(self, engines: Any = None) -> list[str]:
        self.next = loop.run(self.config, self, self, engines or self, self.report, self.stop)
        return self.calls

    def generate(self, rollout_id: int, saves: bool, version: int) -> Future:
        self.calls.append(f"generate {rollout_id}")
        self.with_checkpoint += [rollout_id] * saves
        assert version == self.version or self.version is None  # None: no engine has weights
        self.generated_with.append(self.version)
        metrics = {"rollout/raw_reward": float(rollout_id)}
        data = [f"data {rollout_id}"]
        return done(RolloutBatch(data, metrics, tokens=0, forward_flops=0.0, data_bytes=self.data_bytes))

    def evaluate(self, rollout_id: int, held_out: dict[str, list[object]] | None = None) -> Future:
        """Evaluates with the rollout manager, or with the trainer if it has held-out sets."""
        if held_out is not None:
            self.calls.append(f"losses {rollout_id} {held_out}")
            return done({"eval/held/loss": 0.5})
        self.calls.append(f"evaluate {rollout_id}")
        sets = {} if self.held_out is None else {"held": self.held_out}
        return done(Evaluated({"eval/set": float(rollout_id)}, held_out=sets))

    def trainer_call(self, call: str) -> Future | None:
        """Records a call of the trainer. Returns a failed future if the call must fail."""
        self.calls.append(call)
        if not self.faults.get(call):
            return None
        future: Future = Future()
        future.set_exception(self.faults[call].pop(0))
        return future

    def train(self, rollout_id: int, rank_data: list[Any]) -> Future:
        assert rank_data == [f"data {rollout_id}"]
        if (failed := self.trainer_call(f"train {rollout_id}")) is not None:
            return failed
        assert rollout_id == self.weights
        self.weights += 1
        if rollout_id == self.stops_in:
            self.stop.set()
        return done(TrainResult([{"train/loss": 0.0}], {}, {}))

    def save(self, rollout_id: int) -> Future:
        return self.trainer_call(f"save {rollout_id}") or done(None)

    def save_in_memory(self, rollout_id: int) -> Future:
        return self.trainer_call(f"memory {rollout_id}") or done(None)

    def check(self) -> None:
        if self.faults.get("check"):
            raise self.faults["check"].pop(0)

    def end_ranks(self) -> None:
        self.weights = -1

    def find_states(self, role: str) -> list[StoredState]:
        return []

    @contextmanager
    def restarted(self, point: RecoveryPoint | None, check: Callable[[], None]) -> Iterator[int]:
        self.weights = self.start_rollout_id if point is None else point.iteration + 1
        if (failed := self.trainer_call(f"restart {self.weights}")) is not None:
            failed.result()
        yield self.weights

    def finish_save(self) -> Future:
        self.calls.append("finish save")
        return done(None)

    def publish(self, version: int) -> dict[str, float]:
        if (failed := self.trainer_call(f"publish {version}")) is not None:
            failed.result()
        self.version = version
        return {"perf/update_weights_density": 0.5}

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> bool:
        self.calls.append("wake")
        return self.drops_weights

    def check_health(self) -> None:
        self.calls.append("check_health")

    def log(self, metrics: Any, step: int, step_key: str) -> None:
        self.logged.append((step_key, step))
        self.metrics.append(metrics)

    def progress(self) -> tuple[int, int]:
        return 1, 2

    def close(self, state) -> None: ...


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]
