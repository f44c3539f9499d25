"""Runs a trainer's rollout manager and rollout hosts in separate processes, with engine doubles, on one queue."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_processes import forks
from rollout_double import make_args, make_state, write_lines

from slime.data.source import PromptDataSource
from slime.rollout import vllm_rollout
from slime.rollout.straw.host import RolloutHost
from slime.rollout.stream import stream
from slime.rollout.stream.remote import QueuedWork
from slime.rollout.stream.snapshot_start import begin_snapshots

LEASE_S = 1.0
PROMPTS = [f"{letter}{digit}" for letter in "bcdefghi" for digit in range(8)]


def queue_flags(folder: Path, **flags: object) -> dict[str, Any]:
    """Returns the flags of a run with a queue in `folder`."""
    return {
        "rollout_data_transport": "straw",
        "rollout_data_dir": str(folder / "queues"),
        "rollout_queue_run_id": "q",
        "rollout_queue_lease_seconds": LEASE_S,
        "rollout_snapshot_s": 0.2,
        "server_concurrency": 4,
        "max_staleness": 1,
        "custom_rm_path": "straw_processes.reward_of_length",
        **flags,
    }


async def reward_of_length(args: object, sample: Any) -> float:
    if sample.prompt == "unscorable":
        raise KeyError("no answer")
    return float(sample.response_length)


def slow_down(state: Any, seconds: float) -> None:
    """Makes every request of the engine double last this time."""
    own = state.engine.generate

    async def generate(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(seconds)
        return await own(*args, **options)

    state.engine.generate = generate


class Trainer:
    """The manager of a run, and its loop: one batch after the other, with a checkpoint of each position."""

    def __init__(
        self, folder: Path, start: int = 0, prompts: list[str] | None = None, more: str = "", **flags: object
    ) -> None:
        data = write_lines(
            folder / "d.jsonl", [{"prompt": p, "metadata": {"more": more}} for p in prompts or PROMPTS]
        )
        given = {
            "prompt_data": data,
            "save": str(folder),
            "load": str(folder),
            "run_dir": str(folder / "run"),
        }
        self.args = make_args(**{**queue_flags(folder), **given, **flags})
        self.state, self.folder = make_state(self.args), folder
        self.state.events.add("start", rollout=start)
        self.source = PromptDataSource(self.args)
        self.source.load(start - 1)
        begin_snapshots(self.state, self.source, start)
        self.queue = self.state.has_part(QueuedWork)
        self.engine = self.state.engine

    def train(self, rollout_id: int, ahead: int = 1) -> Any:
        """Returns the batch of a rollout, which counts as trained."""
        self.engine.version = rollout_id
        (self.folder / "version").write_text(str(rollout_id))
        self.state.allow(rollout_id + ahead, rollout_id)
        output = vllm_rollout.generate_rollout(self.args, rollout_id, self.source)
        self.source.save(rollout_id, stream.outstanding(self.state))
        self.state.events.add("step", rollout=rollout_id)
        return output

    def end(self) -> None:
        self.state.run(stream.stop(self.state))
        self.state.run(self.queue.leave())
        self.state.run(self.queue.close())
        self.state.close()


def run_trainer(folder: str, start: int, hosts: int, step_s: float, flags: dict[str, Any]) -> None:
    """Trains when so many other hosts have joined, until the file `stop` exists."""
    trainer = Trainer(Path(folder), start, **flags)
    slow_down(trainer.state, 0.1)
    assert until(lambda: trainer.queue.service.hosts() > hosts)
    for rollout_id in itertools.count(start):
        trainer.train(rollout_id)
        if (Path(folder) / "stop").exists():
            break
        time.sleep(step_s)
    trainer.end()


async def follow_weights(state: Any, path: Path) -> None:
    """Gives the engine double the version of the trainer, as `vime rollout` follows the weights."""
    while True:
        if path.exists() and (text := path.read_text()):
            state.engine.version = int(text)
            state.allow(int(text), int(text))
        await asyncio.sleep(0.02)


def run_host(folder: str, name: str, flags: dict[str, Any]) -> None:
    """Generates until the run has ended."""
    state = make_state(make_args(**{**queue_flags(Path(folder)), **flags}))
    slow_down(state, 0.1)
    host = RolloutHost(state, name)
    state.submit(follow_weights(state, Path(folder) / "version"))
    counts = state.run(host.serve())
    (Path(folder) / f"{name}.json").write_text(json.dumps(counts))
    state.close()


class Process:
    """A process that runs a function of this module. Its parent has made the imports, which take seconds."""

    def __init__(self, function: Callable[..., None], folder: Path, name: str, *given: object) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.process = forks().Process(target=_logged, args=(str(self.log), function, str(folder), *given))
        self.process.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, number)
        if number == signal.SIGKILL:
            self.process.join()

    def finish(self, timeout_s: float = 60) -> None:
        self.process.join(timeout_s)
        code = self.process.exitcode
        self.kill()
        assert code == 0, f"{self.name} ended with {code}:\n{self.log.read_text()[-3000:]}"


def _logged(log: str, function: Callable[..., None], *given: object) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    function(*given)


def start_trainer(folder: Path, start: int, hosts: int, step_s: float = 0.1, **flags: object) -> Process:
    return Process(run_trainer, folder, "trainer", start, hosts, step_s, flags)


def start_host(folder: Path, name: str, **flags: object) -> Process:
    return Process(run_host, folder, name, name, flags)


def until(condition: Callable[[], Any], limit_s: float = 40.0) -> Any:
    end = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return found
