"""A run that gets SIGTERM with --exit-signal-handler, and goes on later as if nothing had been; checkpoints are written
in the background, and two stay."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_fixtures import World, launched, make_world, rows, run, vime

from slime.checkpoints.checkpoint_files import iterations

ROLLOUTS = 40


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def losses(run_dir: Path) -> dict[int, float]:
    return {step: row["train/loss"] for step, row in rows(run_dir, "train/step").items()}


def test_sigterm_saves_and_the_next_start_goes_on(world: World) -> None:
    run(vime("train", *world.sft("whole", rollouts=ROLLOUTS)), world.root / "whole.out")
    save = world.root / "saved"
    flags = [
        *("--save", str(save), "--load", str(save), "--save-interval", "4", "--async-save"),
        *("--exit-signal-handler", "--max-actor-ckpt-to-keep", "2"),
    ]
    command, out = vime("train", *world.sft("parts", rollouts=ROLLOUTS), *flags), world.root / "parts.out"
    with launched(command, out) as launch:
        launch.wait_for(lambda: len(losses(world.root / "parts")) > 5, "six steps", 240)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.finish(60) == 143, launch.output
    ended = max(losses(world.root / "parts"))
    assert 5 <= ended < ROLLOUTS - 1
    assert f"saved the checkpoint of rollout {ended}, rollout {ended + 1} is the next" in launch.output
    assert launch.output.splitlines()[-1].startswith("interrupted by SIGTERM: everything"), launch.output
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(ended)
    assert iterations(save) == [(ended - 1) // 4 * 4 + 3 if ended % 4 == 0 else ended // 4 * 4 - 1, ended]
    run(command, out)
    assert losses(world.root / "parts") == losses(world.root / "whole")
    assert iterations(save) == [ROLLOUTS - 5, ROLLOUTS - 1]
    assert not list(save.glob(".iter*"))
    left = sorted(file.name for file in (save / "rollout").iterdir())
    assert left == [f"data_state_{i}.json" for i in (ROLLOUTS - 5, ROLLOUTS - 1)]
