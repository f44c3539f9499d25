"""The examples of TRL and verl are imported and train the tiny model, and each reward is that of the user's own
function, called as its trainer calls it."""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from train_fixtures import ROOT, World, make_world
from transformers import AutoTokenizer

import vime
from vime.cli import main

pytestmark = pytest.mark.e2e
TRL, VERL = ROOT / "examples/from-trl", ROOT / "examples/from-verl"
ROLLOUTS, SAMPLES = 2, 16
TINY = {"device": "cpu", "save_samples": SAMPLES}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


@pytest.fixture
def folder(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder from which the user calls the commands, with the examples as in the checkout."""
    folder = world.root / "work"
    shutil.copytree(ROOT / "examples", folder / "examples")
    monkeypatch.chdir(folder)
    yield folder
    shutil.rmtree(folder)


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def samples(run: Any) -> list[Any]:
    found = [sample for rollout in range(ROLLOUTS) for sample in run.samples_from(rollout)]
    assert len(found) == ROLLOUTS * SAMPLES and len({sample.reward for sample in found}) > 3, "rewards vary"
    return found


@pytest.mark.slow
def test_trl(world: World, folder: Path) -> None:
    assert main(["import", "examples/from-trl/train_grpo.py", "--output", "grpo.yaml"]) == 0
    runpy.run_path("grpo_data.py")
    seen: list[float] = []
    run = vime.train(
        "grpo.yaml",
        callbacks=[lambda run, metrics: seen.append(metrics["rollout/raw_reward"])],
        hf_checkpoint=world.model,
        run_dir="trl",
        **TINY,
    )
    own = module(folder / "grpo_rewards.py")
    for sample in samples(run):
        columns = {
            name: [value] for name, value in sample.metadata.items() if name in ("solution", "question")
        }
        messages = [[{"role": "assistant", "content": text_of(world, sample)}]]
        given = {"prompts": [sample.metadata["raw_prompt"]], "completions": messages, **columns}
        (right,), (digits,) = own.correct(**given), own.digits(**given)
        assert sample.reward == 1.0 * right + 0.5 * (digits or 0.0), sample
        assert sample.metadata["reward_parts"]["digits"] == pytest.approx(digits, nan_ok=True)
        assert [message["role"] for message in sample.metadata["raw_prompt"]] == ["system", "user"]
    assert seen == [row["rollout/raw_reward"] for row in run.metrics] and len(seen) == ROLLOUTS


@pytest.mark.slow
def test_verl(world: World, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_data.py", "examples/from-trl/problems.jsonl", "words.parquet"])
        runpy.run_path("examples/from-verl/make_data.py", run_name="__main__")
    assert main(["import", "examples/from-verl/run_grpo.sh", "--output", "verl.yaml"]) == 0
    run = vime.train("verl.yaml", hf_checkpoint=world.model, run_dir="verl", **TINY)
    own = module(VERL / "reward.py")
    rows = {row["reward_model"]["ground_truth"]: row for row in pq.read_table("words.parquet").to_pylist()}
    for sample in samples(run):
        row = rows[sample.label]
        expected = own.compute_score(
            data_source=row["data_source"],
            solution_str=text_of(world, sample),
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row["extra_info"],
        )
        assert sample.reward == expected["score"], sample
        assert sample.metadata["reward_parts"] == {"correct": 0.0, "digits": expected["digits"]}
    assert "rollout/reward/digits" in run.metrics[-1]


def text_of(world: World, sample: Any) -> str:
    """Returns the response as both trainers decode it: without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    return str(tokenizer.decode([token.id for token in sample.tokens], skip_special_tokens=True))
