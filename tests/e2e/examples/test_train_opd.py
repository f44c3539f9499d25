"""Tests a whole run of on-policy distillation on the tiny model: the KL from the example's student to its teacher
falls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from train_fixtures import ROOT, World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_the_examples_student_comes_near_its_teacher(world: World) -> None:
    teacher = world.root / "teacher"
    warmed = [*world.sft("sft", rollouts=20), "--save-hf", str(teacher), "--save", str(world.root / "ckpt")]
    run(vime("train", *warmed), world.root / "sft.out")
    command = vime(
        *("train", "--config", str(ROOT / "examples/opd/opd.yaml"), "--opd-teacher-load", str(teacher)),
        *("--hf-checkpoint", str(world.model), "--prompt-data", str(world.data / "train.jsonl")),
        *("--run-dir", str(world.root / "example")),
    )
    printed = run(command, world.root / "example.out")
    order = "step: teacher_log_probs (teacher) -> old_log_probs (policy) -> train policy\n"
    assert order in printed
    found = [row["rollout/opd_reverse_kl"] for row in rows(world.root / "example", "rollout/step").values()]
    print([round(x, 2) for x in found])
    assert len(found) == 20 and sum(found[-3:]) / 3 < 0.5 * found[0]
    assert all(kl > 0 for kl in found[:3])
