"""A whole run of DPO on the tiny model: the example's policy learns what its pairs prefer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from train_fixtures import ROOT, World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_the_example_learns_to_prefer(world: World) -> None:
    pairs = world.root / "pairs.jsonl"
    made = [str(ROOT / "examples/dpo/pairs.py"), str(world.data / "train.jsonl"), str(pairs)]
    run([vime()[0], *made], world.root / "pairs.out")
    command = vime(
        *("train", "--config", str(ROOT / "examples/dpo/dpo.yaml"), "--hf-checkpoint", str(world.model)),
        *("--prompt-data", str(pairs), "--run-dir", str(world.root / "example")),
    )
    printed = run(command, world.root / "example.out")
    assert "step: ref_log_probs (reference) -> train policy\n" in printed
    steps = [row for _, row in sorted(rows(world.root / "example", "train/step").items())]
    loss, right = ([row[f"train/{name}"] for row in steps] for name in ("loss", "rewards/accuracies"))
    print([round(x, 2) for x in loss], [round(x, 2) for x in right])
    assert len(loss) == 20 and loss[0] == pytest.approx(0.693, abs=1e-3)  # log 2: the policy is the reference
    # every row is seen once: none was trained before
    assert loss[-1] < 0.3 and right[-1] > 0.95
