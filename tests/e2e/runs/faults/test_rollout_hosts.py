"""A run with a queue (--rollout-data-transport straw), and two rollout hosts with real engines. One host is killed with
SIGKILL, then the run itself, which resumes while the other host goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from train_fixtures import Launch, World, launched, make_world, rows, vime

from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROLLOUTS = 24


@pytest.fixture
def world() -> Iterator[World]:
    yield from make_world()


def flags(world: World) -> list[str]:
    """Returns the flags that the run and its hosts share."""
    return [
        *world.grpo("run", rollouts=ROLLOUTS),
        *(
            "--device",
            "cpu",
            "--actor-num-gpus-per-node",
            "1",
            "--rollout-num-gpus",
            "1",
            "--max-staleness",
            "1",
        ),
        *("--rollout-data-transport", "straw", "--rollout-data-dir", str(world.root / "queues")),
        *("--rollout-queue-run-id", "q", "--rollout-queue-lease-seconds", "5", "--rollout-snapshot-s", "1"),
        *("--save", str(world.root / "save"), "--load", str(world.root / "save"), "--save-interval", "1"),
        *(
            "--rollout-max-response-len",
            "64",
            "--vllm-server-concurrency",
            "8",
            "--vllm-max-model-len",
            "256",
        ),
    ]


def leases(world: World) -> list[str]:
    """Returns the host of each lease so far."""
    run_dir = world.root / "run"
    if not (run_dir / "events.jsonl").exists():
        return []
    return [str(event.get("host")) for event in read_events(run_dir, ("leased",))]


def name_of(host: Launch) -> str:
    """Returns the name of a rollout host in the queue."""
    found = host.wait_for(
        lambda: [line for line in host.output.splitlines() if line.startswith("rollout host ")], "start", 150
    )
    return str(found[0].split()[2])


def steps(world: World) -> int:
    return len(rows(world.root / "run", "train/step")) if (world.root / "run").exists() else 0


def kill(launch: Launch) -> None:
    """Kills a command and all its processes at once."""
    command = psutil.Process(launch.process.pid)
    for process in [command, *command.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_hosts_feed_a_run_and_any_writer_may_be_killed(world: World) -> None:
    shared = flags(world)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(launched(vime("rollout", *shared), world.root / f"host-{i}.out"))
            for i in range(2)
        )
        names = [name_of(first), name_of(second)]
        run = stack.enter_context(launched(vime("train", *shared), world.root / "run.out"))
        run.wait_for(lambda: set(names) <= set(leases(world)) and steps(world) >= 2, "leases of all", 200)
        kill(first)
        run.wait_for(lambda: steps(world) >= 6, "step 6", 100)
        kill(run)
        before = len(leases(world))
        again = stack.enter_context(launched(vime("train", *shared), world.root / "again.out"))
        again.wait_for(lambda: names[1] in leases(world)[before:], "lease of the second host", 200)
        assert again.finish(200) == 0, again.output[-3000:]
        assert second.finish(60) == 0, second.output[-3000:]
    assert "groups of this host were used" in second.output
    ledger = read_ledger(world.root / "run")
    assert ledger.is_exact and ledger.over_limit == 0 and ledger.starts == 2
    assert sorted(ledger.batches) == sorted(ledger.trained) == list(range(ROLLOUTS))
    assert sampled_by_hosts(world.root, names[1])


def sampled_by_hosts(root: Path, name: str) -> set[int]:
    """Returns the versions of the weights that the engines of a host have loaded."""
    found = read_events(root / "queues" / "q" / "hosts" / name, ("weights",))
    versions = {int(event.get("version")) for event in found}
    assert len(versions) > 3 and max(versions) > 6, versions
    return versions
