"""Faults that tests/e2e causes on CPUs and tests/gpu on GPUs: the same runs, the same proofs.

An engine takes up to a minute to start, so a run has several faults, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from train_fixtures import PROMPTS, SAMPLES, Launch, World, launched, published_weights, rows, samples, vime

HERE = Path(__file__).parent
STOP_S = 60
"""What a run may take to end after it has lost a trainer."""


@dataclass(frozen=True)
class Kind:
    """What differs between devices. `part`: of a weight update, before which the engine is killed; CPUs send one file.
    `logprob_diff`: nats between trainer and engine. `deadline_s`: far more than a rollout takes."""

    flags: tuple[str, ...]
    part: int
    logprob_diff: float
    deadline_s: int


KINDS = {
    "cpu": Kind(("--max-tokens-per-gpu", "1024", "--rollout-max-response-len", "32"), 1, 1e-5, 20),
    "cuda": Kind(
        (
            *("--max-tokens-per-gpu", "16384", "--rollout-max-response-len", "128", "--lr", "1e-5"),
            # In bytes: vLLM's own measurement would count what other tests on this GPU take meanwhile.
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
    """A colocated GRPO run with a checkpoint every other rollout, and what a test watches of it."""

    def __init__(self, world: World, name: str) -> None:
        self.kind, self.run_dir = KINDS[world.device], world.root / name
        self.output = world.root / f"{name}.out"
        self.checkpoint = self.run_dir / "checkpoint"
        self.flags = [
            *world.grpo(name, rollouts=500, reward="striking_reward"),
            *("--colocate", "--actor-num-gpus-per-node", "1"),
            # Few at a time: when two groups are scored, the others are yet to be generated.
            *("--vllm-max-num-seqs", str(SAMPLES), *self.kind.flags),
            *("--save", str(self.checkpoint), "--load", str(self.checkpoint), "--save-interval", "2"),
        ]

    def steps(self) -> dict[int, dict[str, float]]:
        return rows(self.run_dir, "train/step")

    def saved(self) -> int:
        """Rollout of the newest checkpoint, -1 when there is none."""
        newest = self.checkpoint / "latest_checkpointed_iteration.txt"
        return int(newest.read_text() or -1) if newest.exists() else -1

    def strike(self, launch: Launch, pid: int, number: int) -> int:
        """Have a signal sent amid the next rollout, by its reward; that rollout's number, when it has been sent."""
        order, struck = self.run_dir / "strike", self.run_dir / "struck"
        written = order.with_suffix(".written")
        written.write_text(f"{pid} {int(number)}")
        written.rename(order)
        launch.wait_for(struck.exists, "a rollout to strike in", 180)
        hit = int(struck.read_text())
        struck.unlink()
        return hit

    def assert_right_weights(self) -> None:
        """No step was trained on what other weights than the last published ones had sampled."""
        for step, row in self.steps().items():
            assert row["train/train_rollout_logprob_abs_diff"] < self.kind.logprob_diff, (step, row)
            drawn = samples(self.run_dir, step)
            assert len(drawn) == PROMPTS * SAMPLES
            # Not the checkpoint's weights that a new server begins with (-1).
            assert all(s["weight_versions"] == [step] for s in drawn), step


def server(launch: Launch) -> int:
    """Process id of the one engine server."""
    (found,) = launch.find(r"^\S+ -m vllm\.entrypoints")
    return found


def engines_killed(run: FaultyRun) -> None:
    """An engine that dies in a weight update and one that dies in a rollout are replaced, with the weights of the
    trainer."""
    deadly = [sys.executable, str(HERE / "deadly_update.py"), str(run.kind.part), *run.flags]
    with launched(deadly, run.output) as launch:
        launch.wait_for(lambda: 1 in run.steps(), "a step after the engine died in an update", 360)
        assert "deadly_update: SIGKILL" in launch.output
        assert launch.output.count("died during a control call") == 1
        assert launch.output.count("serves again") == 1
        hit = run.strike(launch, server(launch), signal.SIGKILL)
        launch.wait_for(lambda: hit + 1 in run.steps(), "a step after the engine died in a rollout", 360)
        assert launch.output.count("died during a control call") == 1
        assert launch.output.count("serves again") == 2
    run.assert_right_weights()


def trainer_killed(run: FaultyRun) -> None:
    """A trainer that dies ends the run, which names it and leaves its checkpoint."""
    with launched(vime("train", *run.flags), run.output) as launch:
        launch.wait_for(lambda: run.saved() >= 0, "a checkpoint", 240)
        with ends_with_its_trainer(launch) as trainer:
            run.strike(launch, trainer, signal.SIGKILL)  # nobody calls the trainer amid a rollout
    assert not published_weights(run.run_dir).exists()
    run.assert_right_weights()


@contextlib.contextmanager
def ends_with_its_trainer(launch: Launch) -> Iterator[int]:
    """For a block that sends SIGKILL to the trainer rank it gets: the run ends in time, says which one it was, and
    shows its last log lines."""
    before = len(launch.output)  # what engines that died had to say has tracebacks
    yield launch.find(r"^ray::TrainerActor")[-1]
    assert launch.finish(STOP_S) == 1
    said = launch.output[before:]
    assert "Traceback" not in said, said
    assert re.search(r"the last lines of \S+/trainer-\d\.log:\n.+", said)
    assert re.match(r"vime train: trainer-\d failed: its process died", said.splitlines()[-2]), said


def rank_killed(world: World, name: str, *, ranks: int) -> None:
    """The last of several ranks dies while the others are in a collective with it, or soon will be."""
    flags = [*world.sft(name, rollouts=10_000), "--actor-num-gpus-per-node", str(ranks)]
    with launched(vime("train", *flags), world.root / f"{name}.out") as launch:
        launch.wait_for(lambda: rows(world.root / name, "train/step"), "the first step", 180)
        assert len(launch.find(r"^ray::TrainerActor")) == ranks
        with ends_with_its_trainer(launch) as trainer:
            os.kill(trainer, signal.SIGKILL)


def resumed_with_a_slow_engine_then_interrupted(run: FaultyRun) -> None:
    """The command of `trainer_killed` goes on after the checkpoint. An engine that does not answer within the deadline
    costs the groups that waited for it, which are counted; Ctrl-C ends everything."""
    saved, last, deadline_s = run.saved(), max(run.steps()), run.kind.deadline_s
    # Who does not answer for long is dead otherwise.
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
        assert "died" not in launch.output
        assert "Traceback" not in launch.output, launch.output[-3000:]
    assert not published_weights(run.run_dir).exists()
    generated = rows(run.run_dir, "rollout/step")
    assert generated[hit]["rollout/dynamic_filter/drop_deadline"] > 0
    assert hit > saved and sorted(run.steps()) == list(range(max(run.steps()) + 1))
    run.assert_right_weights()
