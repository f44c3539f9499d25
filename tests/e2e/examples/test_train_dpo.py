"""Whole runs on preference pairs of the tiny model: a policy and a reward model learn what is preferred."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from train_fixtures import ROOT, World, make_world, rows, run, vime

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def dpo(world: World, name: str, *flags: str) -> str:
    """The output of the example's run with more flags."""
    pairs = world.root / "pairs.jsonl"
    made = [str(ROOT / "examples/dpo/pairs.py"), str(world.data / "train.jsonl"), str(pairs)]
    run([vime()[0], *made], world.root / "pairs.out")
    command = vime(
        *("train", "--config", str(ROOT / "examples/dpo/dpo.yaml"), "--hf-checkpoint", str(world.model)),
        *("--prompt-data", str(pairs), "--run-dir", str(world.root / name), *flags),
    )
    return run(command, world.root / f"{name}.out")


def test_the_example_learns_to_prefer(world: World) -> None:
    printed = dpo(world, "example")
    assert "step: ref_log_probs (reference) -> train policy\n" in printed
    steps = [row for _, row in sorted(rows(world.root / "example", "train/step").items())]
    loss, right = ([row[f"train/{name}"] for row in steps] for name in ("loss", "rewards/accuracies"))
    print([round(x, 2) for x in loss], [round(x, 2) for x in right])
    assert len(loss) == 20 and loss[0] == pytest.approx(0.693, abs=1e-3)  # log 2: the policy is the reference
    # every row is seen once: none was trained before
    assert loss[-1] < 0.3 and right[-1] > 0.95


@pytest.mark.slow
def test_a_reward_model_is_for_transformers(world: World) -> None:
    hf = world.root / "reward"
    kind = ("--loss-type", "reward_model", "--num-rollout", "10")
    dpo(world, "reward-run", *kind, "--save", str(world.root / "ckpt"), "--save-hf", str(hf))
    steps = [row for _, row in sorted(rows(world.root / "reward-run", "train/step").items())]
    assert steps[0]["train/loss"] == pytest.approx(0.693, abs=1e-3) and steps[-1]["train/loss"] < 0.3
    model = transformers.AutoModelForSequenceClassification.from_pretrained(hf)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    scores = []
    for answer in ("46", "It is 46."):
        chat = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            scores.append(float(model(ids).logits))
    assert scores[0] > scores[1] + 0.5
