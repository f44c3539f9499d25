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
from deadly_hooks import order
from train_fixtures import (
    PROMPTS,
    SAMPLES,
    Launch,
    World,
    launched,
    published_weights,
    rows,
    run,
    samples,
    vime,
)

from slime.rollout.stream.snapshot_file import NAME, SnapshotFile
from slime.tracking.journal import read_events
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


def manager_killed(world: World, staleness: int, *more: str, rollouts: int = 6) -> None:
    """The manager is killed in the first rollout, with a saved position that the driver does not use, and while it
    computes a reward."""
    name = f"stale-{staleness}"
    run_dir = world.root / name
    for moment in ("reward-2", "log-2", "reward-18"):
        order(run_dir, moment)
    flags = [
        *world.grpo(name, rollouts=rollouts),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--max-staleness", str(staleness)),
        *("--save", str(run_dir / "checkpoint"), "--save-interval", "4", "--check-weight-update-equal"),
        *("--custom-rm-path", "deadly_hooks.reward", "--rollout-snapshot-s", "0.2"),
        *("--custom-rollout-log-function-path", "deadly_hooks.in_log", *more),
    ]
    with launched(vime("train", *flags), world.root / f"{name}.out") as launch:
        assert launch.finish(400) == 0, launch.output[-3000:]
        assert "Traceback" not in launch.output, launch.output[-3000:]
        assert launch.output.count("the rollout manager is back after") == 3
    assert sorted(rows(run_dir, "train/step")) == list(range(rollouts))
    assert [event["rollout"] for event in read_events(run_dir, ("step",))] == list(range(rollouts))
    ledger = read_ledger(run_dir)
    assert ledger.is_exact and ledger.starts == 1 and ledger.again > 0 and ledger.over_limit == 0
    states = [event["state"] for event in read_events(run_dir, ("engine",))]
    assert states.count("serving") == 1 and "dead" not in states
    for step in range(rollouts):
        versions = [version for s in samples(run_dir, step) for version in s["weight_versions"]]
        assert step - staleness <= min(versions) and max(versions) <= step, step
    seconds = [event["seconds"] for event in read_events(run_dir, ("manager_restarted",))]
    print(f"{name}: restarts took {seconds} s, load {os.getloadavg()[0]:.1f}")


def killed_with_a_snapshot(world: World, *more: str, rollouts: int = 5) -> None:
    """All processes of a run are killed. It resumes with the tokens of its last snapshot.

    Long answers, two sequences at a time: some requests have only a part of their tokens.
    """
    run_dir, save = world.root / "killed", world.root / "killed" / "checkpoint"
    flags = [
        *world.grpo("killed", rollouts=rollouts),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--max-staleness", "1"),
        *("--rollout-max-response-len", "240", "--max-tokens-per-gpu", "1024", "--vllm-max-num-seqs", "2"),
        *(
            "--save",
            str(save),
            "--load",
            str(save),
            "--save-interval",
            "1",
            "--rollout-snapshot-s",
            "1",
            *more,
        ),
    ]
    command = vime("train", *flags)
    with launched(command, world.root / "killed.out") as launch:
        launch.wait_for((save / "latest_checkpointed_iteration.txt").exists, "a checkpoint", 300)
        launch.wait_for(lambda: list(read_events(run_dir, ("checkpoint",))), "its event", 60)
        launch.wait_for(lambda: _finds_tokens(run_dir), "a snapshot", 120)
        launch.clean_up()
    file = SnapshotFile(run_dir / NAME)
    assert file.load() is not None
    records = {number: (file.read(number) or {})["samples"] for number in file.lines}
    stored = {number: sum(s["response_length"] for s in found) for number, found in records.items()}
    print(f"stored {stored}, states {[s['status'] for found in records.values() for s in found]}")
    run(command, world.root / "resumed.out", timeout_s=400)
    restored = {e.get("groups")[0]: e.get("tokens") for e in read_events(run_dir, ("restored",))}
    print(f"restored {restored}")
    assert restored and all(tokens <= stored[number] for number, tokens in restored.items())
    ledger = read_ledger(run_dir)
    assert ledger.is_exact and ledger.starts == 2 and ledger.trained == set(range(rollouts))


def _finds_tokens(run_dir: Path) -> bool:
    """Returns True if a snapshot with tokens is newer than the first checkpoint."""
    (first, *_) = read_events(run_dir, ("checkpoint",))
    later = read_events(run_dir, ("snapshot",), since=first.time)
    return any(event.get("tokens") for event in later)
