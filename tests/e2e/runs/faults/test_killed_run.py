"""A run whose processes are all killed with SIGKILL resumes with the tokens of its last snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import World, launched, make_world, run, vime

from slime.rollout.stream.snapshot_file import NAME, SnapshotFile
from slime.tracking.journal import read_events
from slime.tracking.ledger import read_ledger

ROLLOUTS = 5


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def finds_tokens(run_dir: Path) -> bool:
    """Returns True if a snapshot with tokens is newer than the first checkpoint."""
    (first, *_) = read_events(run_dir, ("checkpoint",))
    later = read_events(run_dir, ("snapshot",), since=first.time)
    return any(event.get("tokens") for event in later)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_tokens_of_its_snapshot(world: World) -> None:
    """Long answers, two sequences at a time: some requests have only a part of their tokens."""
    run_dir, save = world.root / "killed", world.root / "killed" / "checkpoint"
    flags = [
        *world.grpo("killed", rollouts=ROLLOUTS),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--max-staleness", "1"),
        *("--rollout-max-response-len", "240", "--max-tokens-per-gpu", "1024", "--vllm-max-num-seqs", "2"),
        *("--save", str(save), "--load", str(save), "--save-interval", "1", "--rollout-snapshot-s", "1"),
    ]
    command = vime("train", *flags)
    with launched(command, world.root / "killed.out") as launch:
        launch.wait_for((save / "latest_checkpointed_iteration.txt").exists, "a checkpoint", 300)
        launch.wait_for(lambda: list(read_events(run_dir, ("checkpoint",))), "its event", 60)
        launch.wait_for(lambda: finds_tokens(run_dir), "a snapshot", 120)
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
    assert ledger.is_exact and ledger.starts == 2 and ledger.trained == set(range(ROLLOUTS))
