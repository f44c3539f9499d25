"""Tests on-policy distillation from teachers in engines of the run: the example's run, and a run with faults.

The student's KL falls. A killed teacher engine comes back, and the run continues. By transformers, the samples'
teacher log-probs are the teacher's own distribution at the samples' temperature.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from train_fixtures import ROOT, World, launched, make_world, rows, run, samples, vime
from transformers import AutoModelForCausalLM

from slime.types import Sample

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TEMPERATURE, TOP = 0.7, 4


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    for world in make_world():
        warmed = [*world.sft("sft", rollouts=20), "--save-hf", str(world.root / "teacher")]
        run(vime("train", *warmed, "--save", str(world.root / "ckpt")), world.root / "sft.out")
        yield world


def example(world: World, name: str, *flags: str) -> list[str]:
    return vime(
        *("train", "--config", str(ROOT / "examples/opd/opd.yaml"), "--opd-type", "vllm"),
        *("--hf-checkpoint", str(world.model), "--prompt-data", str(world.data / "train.jsonl")),
        *("--run-dir", str(world.root / name), *flags),
    )


def test_the_examples_student_comes_near_its_teacher(world: World) -> None:
    teacher = str(world.root / "teacher")
    run(example(world, "example", "--opd-teacher-model", teacher), world.root / "example.out")
    found = rows(world.root / "example", "rollout/step").values()
    all_of_them = [row["rollout/opd_reverse_kl"] for row in found]
    print([round(x, 2) for x in all_of_them])
    assert len(all_of_them) == 20 and sum(all_of_them[-3:]) / 3 < 0.5 * all_of_them[0]
    assert all(kl > 0 for kl in all_of_them[:3])
    for row in found:  # from the engine's log-probs and from the trainer's
        assert row["rollout/opd_reverse_kl/default"] == pytest.approx(row["rollout/opd_reverse_kl"], abs=1e-3)


def by_source(world: World) -> Path:
    """Writes the prompts of the example; every third prompt has the source "base"."""
    path = world.root / "by_source.jsonl"
    lines = [json.loads(line) for line in (world.data / "train.jsonl").read_text().splitlines()[:300]]
    for i, line in enumerate(lines):
        line["metadata"] = {"data_source": "base"} if i % 3 == 0 else {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_killed_teacher_comes_back_and_sources_have_their_teachers(world: World) -> None:
    teachers = {"base": world.model, "default": world.root / "teacher"}
    run_dir = world.root / "killed"
    flags = [
        *("--prompt-data", str(by_source(world)), "--metadata-key", "metadata"),
        *("--opd-teacher-model", str(teachers["default"]), f"base={teachers['base']}"),
        *("--opd-top-k", str(TOP), "--rollout-temperature", str(TEMPERATURE), "--rollout-batch-size", "16"),
        *("--num-rollout", "400", "--lr", "1e-5"),
        *("--save-debug-rollout-data", str(run_dir / "samples" / "{rollout_id}.pt")),
    ]
    with launched(example(world, "killed", *flags), world.root / "killed.out") as launch:
        launch.wait_for(lambda: 1 in rows(run_dir, "rollout/step"), "a step", 200)
        pattern = rf"vime\.vllm\.serve vllm\.entrypoints.*--model {re.escape(str(teachers['default']))} "
        (server,) = launch.find(rf"^\S+ -m {pattern}")
        os.kill(server, signal.SIGKILL)
        launch.wait_for(lambda: "serves again" in launch.output, "a new teacher", 200)
        after = max(rows(run_dir, "rollout/step")) + 2
        launch.wait_for(lambda: after in rows(run_dir, "rollout/step"), "two more steps", 120)
        launch.process.send_signal(signal.SIGINT)
        assert launch.finish(60) == 130
        assert launch.output.count("died and is restarted") == 1
    drawn = [Sample.from_dict(each) for step in (0, after) for each in samples(run_dir, step)]
    models = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in teachers.items()}
    assert {one.metadata.get("data_source") for one in drawn} == {"base", None}
    for one in drawn[:: len(drawn) // 16]:
        source = one.metadata.get("data_source", "default")
        with torch.no_grad():
            logits = models[source](torch.tensor([one.tokens])).logits[0, -one.response_length - 1 : -1]
        table = (logits.float() / TEMPERATURE).log_softmax(-1)
        wanted = table.gather(-1, torch.tensor(one.tokens[-one.response_length :])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.teacher_log_probs), wanted, atol=1e-4, rtol=0)
        ids, values = map(torch.from_numpy, one.teacher_top)
        assert ids.shape == (one.response_length, TOP)
        torch.testing.assert_close(values, table.topk(TOP).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(table.gather(-1, ids.long()), values, atol=1e-4, rtol=0)
    metrics = rows(run_dir, "rollout/step")[after]
    assert metrics["rollout/opd_samples/base"] + metrics["rollout/opd_samples/default"] == 32
