"""`vime train` with engines goes on after its trainer was killed: nothing is lost, doubled or too stale."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadly_hooks import order
from train_fixtures import World, launched, make_world, rows, samples, vime

from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROLLOUTS = 6


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def flags(world: World, name: str) -> list[str]:
    run_dir = world.root / name
    return [
        *world.grpo(name, rollouts=ROLLOUTS),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
        *("--save", str(run_dir / "checkpoint"), "--save-interval", "4"),
        *("--rollout-data-postprocess-path", "deadly_hooks.in_step"),
        *("--custom-update-weight-post-write-path", "deadly_hooks.after_write"),
        *("--update-weight-transport", "disk", "--check-weight-update-equal", "--verbose"),
    ]


def run(
    world: World, name: str, *more: str, kills: tuple[str, ...] = (), number: int = signal.SIGKILL
) -> str:
    """Returns the digest of the last checkpoint of a run whose trainer is killed at these moments."""
    run_dir = world.root / name
    for moment in kills:
        order(run_dir, moment, number)
    with launched(vime("train", *flags(world, name), *more), world.root / f"{name}.out") as launch:
        assert launch.finish(400) == 0, launch.output[-3000:]
        assert "Traceback" not in launch.output, launch.output[-3000:]
        assert launch.output.count("the trainer is back after") == len(kills)
    assert sorted(rows(run_dir, "train/step")) == list(range(ROLLOUTS))
    assert [event["rollout"] for event in read_events(run_dir, ("step",))] == list(range(ROLLOUTS))
    ledger = read_ledger(run_dir)
    assert ledger.is_exact and ledger.starts == 1 and ledger.again == 0 and ledger.over_limit == 0
    seconds = [event["seconds"] for event in read_events(run_dir, ("trainer_restarted",))]
    print(f"{name}: restarts took {seconds} s, load {os.getloadavg()[0]:.1f}")
    assert not find_memory(run_dir)
    (file,) = (run_dir / "checkpoint" / f"iter_{ROLLOUTS - 1:07d}").glob("*.distcp")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def hash_of(run_dir: Path) -> str:
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]


def test_weights_are_equal_to_the_bit_in_a_synchronous_run(world: World) -> None:
    """From the start of the run, in an update, and from a checkpoint; then from the host's memory."""
    wanted = run(world, "alone")
    assert run(world, "disk", kills=("step-0", "write-2", "step-5")) == wanted
    memory = ("--recover-from", "memory", "--colocate")
    assert run(world, "memory", *memory, kills=("step-1", "write-3")) == wanted
    # the files of the last step may still be written when the rank dies
    assert all(event["repeated"] <= 1 for event in read_events(world.root / "memory", ("trainer_restarted",)))


def test_an_asynchronous_run_keeps_its_requests(world: World) -> None:
    run(world, "ahead", "--max-staleness", "2", kills=("step-1", "write-4"))
    for step in range(ROLLOUTS):
        versions = [version for s in samples(world.root / "ahead", step) for version in s["weight_versions"]]
        assert max(versions) - min(versions) <= 2 and max(versions) <= step, step


@pytest.mark.parametrize(
    "more",
    [("--update-weight-transport", "nccl"), ("--update-weight-mode", "delta")],
    ids=["broadcast", "delta"],
)
def test_engines_get_the_weights_of_restarted_ranks(world: World, more: tuple[str, str]) -> None:
    """--check-weight-update-equal compares each engine's weights with the trainer's after each update. Versions go on
    through both kills: a sample of a step has the version of the step."""
    name = more[1]
    run(world, name, *more, "--recover-from", "memory", kills=("step-1", "step-3"))
    for step in range(ROLLOUTS):
        assert {v for s in samples(world.root / name, step) for v in s["weight_versions"]} == {step}
    sent = [event["version"] for event in read_events(world.root / name, ("weights",))]
    assert sent == list(range(ROLLOUTS + 1))


def test_an_end_during_the_restart_leaves_nothing_in_memory(world: World) -> None:
    """SIGTERM ends the run with its exit code, SIGKILL of the driver leaves the rest to the watchdog."""
    for number, code in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        name = f"ended-{int(number)}"
        order(world.root / name, "step-1")
        command = vime("train", *flags(world, name), "--recover-from", "memory")
        with launched(command, world.root / f"{name}.out") as launch:
            launch.wait_for(lambda launch=launch: "starts again" in launch.output, "a lost trainer", 300)
            assert find_memory(world.root / name)
            os.kill(launch.process.pid, number)
            assert launch.process.wait(60) == code
            launch.await_gone(20)
        assert not find_memory(world.root / name)


def find_memory(run_dir: Path) -> list[Path]:
    return list(Path("/dev/shm").glob(f"vime-{os.getuid()}-*{hash_of(run_dir)}*"))
