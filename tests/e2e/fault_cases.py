"""Provides faults that tests/e2e causes on CPUs and tests/gpu causes on GPUs, with the same runs and the same
assertions.

An engine takes up to a minute to start, so each run has several faults, one after another.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from train_fixtures import PROMPTS, SAMPLES, Launch, World, launched, published_weights, rows, samples, vime

from slime.tracking.ledger import read_ledger

HERE = Path(__file__).parent
STOP_S = 60
"""Seconds in which a run must end after a trainer has died."""


@dataclass(frozen=True)
class Kind:
    """The differences between devices. `part`: the engine is killed before this part of a weight update (CPUs send
    one file). `logprob_diff`: nats between trainer and engine. `deadline_s`: much longer than a rollout."""

    flags: tuple[str, ...]
    part: int
    logprob_diff: float
    deadline_s: int


KINDS = {
    "cpu": Kind(("--max-tokens-per-gpu", "1024", "--rollout-max-response-len", "32"), 1, 1e-5, 20),
    "cuda": Kind(
        (
            *("--max-tokens-per-gpu", "16384", "--rollout-max-response-len", "128", "--lr", "1e-5"),
            # The cache size is in bytes, because vLLM's measurement would count other tests' memory on this GPU.
            *("--vllm-gpu-memory-utilization", "0.15", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
            *("--vllm-max-model-len", "1024", "--vllm-enforce-eager"),
            *("--update-weight-buffer-size", str(2**24), "--check-weight-update-equal"),
        ),
        2,
        0.1,
        20,
    ),
}


class FaultyRun:
    """A colocated GRPO run with a checkpoint every other rollout, and helpers to observe it."""

    def __init__(self, world: World, name: str) -> None:
        self.kind, self.run_dir = KINDS[world.device], world.root / name
        self.output = world.root / f"{name}.out"
        self.checkpoint = self.run_dir / "checkpoint"
        self.flags = [
            *world.grpo(name, rollouts=500, reward="striking_reward"),
            *("--colocate", "--actor-num-gpus-per-node", "1"),
            # Few sequences at a time: when two groups are scored, other groups are not generated yet.
            *("--vllm-max-num-seqs", str(SAMPLES), *self.kind.flags),
            *("--save", str(self.checkpoint), "--load", str(self.checkpoint), "--save-interval", "2"),
        ]

    def steps(self) -> dict[int, dict[str, float]]:
        return rows(self.run_dir, "train/step")

    def saved(self) -> int:
        """Rollout of the newest checkpoint, or -1 without one."""
        newest = self.checkpoint / "latest_checkpointed_iteration.txt"
        return int(newest.read_text() or -1) if newest.exists() else -1

    def strike(self, launch: Launch, pid: int, number: int) -> int:
        """Orders the reward to send a signal during the next rollout, waits for it, and returns that rollout's
        number."""
        order, struck = self.run_dir / "strike", self.run_dir / "struck"
        written = order.with_suffix(".written")
        written.write_text(f"{pid} {int(number)}")
        written.rename(order)
        launch.wait_for(struck.exists, "a rollout to strike in", 180)
        hit = int(struck.read_text())
        struck.unlink()
        return hit

    def assert_right_weights(self) -> None:
        """Every step was trained only on samples of the last published weights."""
        for step, row in self.steps().items():
            assert row["train/train_rollout_logprob_abs_diff"] < self.kind.logprob_diff, (step, row)
            drawn = samples(self.run_dir, step)
            assert len(drawn) == PROMPTS * SAMPLES
            # A new server starts with the checkpoint's weights, version -1. No sample may have that version.
            assert all(s["weight_versions"] == [step] for s in drawn), step


def server(launch: Launch) -> int:
    """Returns the process id of the only engine server."""
    (found,) = launch.find(r"^\S+ -m vime\.vllm\.serve vllm\.entrypoints")
    return found


def engines_killed(run: FaultyRun) -> None:
    """One engine is killed in a weight update, and another in a rollout. Both are replaced and get the trainer's
    weights."""
    deadly = [sys.executable, str(HERE / "deadly_update.py"), str(run.kind.part), *run.flags]
    with launched(deadly, run.output) as launch:
        launch.wait_for(lambda: 1 in run.steps(), "a step after the engine died in an update", 360)
        assert "deadly_update: SIGKILL" in launch.output
        assert launch.output.count("is replaced: a control call failed") == 1
        assert launch.output.count("serves again") == 1
        hit = run.strike(launch, server(launch), signal.SIGKILL)
        launch.wait_for(lambda: hit + 1 in run.steps(), "a step after the engine died in a rollout", 360)
        assert launch.output.count("is replaced: a control call failed") == 1
        assert launch.output.count("serves again") == 2
    run.assert_right_weights()


def trainer_killed(run: FaultyRun) -> None:
    """A trainer that dies ends the run if it may not start again. The error names the trainer, and the checkpoint
    stays."""
    with launched(vime("train", *run.flags, "--max-trainer-restarts", "0"), run.output) as launch:
        launch.wait_for(lambda: run.saved() >= 0, "a checkpoint", 240)
        with ends_with_its_trainer(launch) as trainer:
            run.strike(launch, trainer, signal.SIGKILL)  # no one calls the trainer during a rollout
    assert not published_weights(run.run_dir).exists()
    run.assert_right_weights()


@contextlib.contextmanager
def ends_with_its_trainer(launch: Launch) -> Iterator[int]:
    """Yields the process id of a trainer rank, to which the block sends SIGKILL. Afterwards the run must end in time,
    name the rank and its log."""
    before = len(launch.output)  # earlier output has tracebacks of killed engines
    yield launch.find(r"^ray::TrainerActor")[-1]
    assert launch.finish(STOP_S) == 1
    said = launch.output[before:]
    assert "Traceback" not in said, said
    assert re.search(r"^vime train: trainer-\d failed: its process died", said, re.M), said
    assert re.search(r"^more in \S+/trainer-\d\.log$", said, re.M), said


def rank_killed(world: World, name: str, *, ranks: int) -> None:
    """Kills the last rank while the other ranks wait for it in a collective, or soon will."""
    flags = [*world.sft(name, rollouts=10_000), "--actor-num-gpus-per-node", str(ranks)]
    flags += ["--max-trainer-restarts", "0"]
    with launched(vime("train", *flags), world.root / f"{name}.out") as launch:
        launch.wait_for(lambda: rows(world.root / name, "train/step"), "the first step", 180)
        assert len(launch.find(r"^ray::TrainerActor")) == ranks
        with ends_with_its_trainer(launch) as trainer:
            os.kill(trainer, signal.SIGKILL)


def resumed_with_a_slow_engine_then_interrupted(run: FaultyRun) -> None:
    """The command of `trainer_killed` resumes after the checkpoint. If an engine does not answer within the deadline,
    the groups that waited for it are dropped and counted. Ctrl-C ends everything."""
    saved, last, deadline_s = run.saved(), max(run.steps()), run.kind.deadline_s
    # With the default timeout, an engine that does not answer would be replaced.
    patience = ("--rollout-health-check-timeout", "300")
    command = vime("train", *run.flags, "--rollout-deadline-s", str(deadline_s), *patience)
    with launched(command, run.output.with_suffix(".resumed")) as launch:
        launch.wait_for(lambda: max(run.steps()) > last, "a step that the killed run had not made", 180)
        hit = run.strike(launch, slow := server(launch), signal.SIGSTOP)
        time.sleep(1.2 * deadline_s)
        os.kill(slow, signal.SIGCONT)
        launch.wait_for(lambda: hit + 1 in run.steps(), "a step after the engine was slow", 180)
        interrupted = time.monotonic()
        os.killpg(launch.process.pid, signal.SIGINT)
        assert launch.finish(30) == 130
        assert time.monotonic() - interrupted < 30
        assert "interrupted" in launch.output.splitlines()[-1]
        ended = max(run.steps())
        assert f"saved the checkpoint of rollout {ended}, rollout {ended + 1} is the next" in launch.output
        assert re.search(
            rf"engine engine-0-1 at \S+ has not answered for [12]\d s: .*stopped {slow}", launch.output
        )
        assert launch.output.count("the run waits") == launch.output.count("works again after") == 1
        assert "died" not in launch.output
        assert "Traceback" not in launch.output, launch.output[-3000:]
    assert not published_weights(run.run_dir).exists()
    generated = rows(run.run_dir, "rollout/step")
    assert generated[hit]["rollout/dynamic_filter/drop_deadline"] > 0
    assert hit > saved and sorted(run.steps()) == list(range(max(run.steps()) + 1))
    ledger = read_ledger(run.run_dir)
    assert ledger.is_exact and ledger.starts == 2 and ledger.again > 0 and ledger.dropped["deadline"] > 0
    run.assert_right_weights()


@contextlib.contextmanager
def training(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Yields a run after its first step. It must end within 15 s of the block, and leave nothing in the temporary
    folder."""
    temporary = Path(
        tempfile.mkdtemp(prefix="vt-", dir=world.root.parent)
    )  # paths of Unix sockets have a limit
    monkeypatch.setenv("TMPDIR", str(temporary))
    semaphores = set(Path("/dev/shm").glob("sem.*"))
    with launched(vime("train", *world.sft(name, rollouts=10_000)), world.root / f"{name}.out") as launch:
        launch.wait_for(lambda: rows(world.root / name, "train/step"), "a step", 240)
        assert list(temporary.glob("vime-*/session_latest"))  # Ray's files are in the same folder
        yield launch
        began = time.monotonic()
        launch.process.wait(15)
        print(f"ended after {time.monotonic() - began:.1f} s")
        launch.await_gone(10)
    assert [path.name for path in temporary.iterdir() if "torchinductor" not in path.name] == []
    assert set(Path("/dev/shm").glob("sem.*")) <= semaphores
    shutil.rmtree(temporary)
