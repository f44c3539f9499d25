"""Tests whole runs on preference pairs with the tiny model: a policy and a reward model learn the preferences."""

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


def table_rows(world: World, part: str) -> str:
    """Returns the file of pairs that the example makes from a part of the data."""
    pairs = world.root / f"{part}-pairs.jsonl"
    made = [str(ROOT / "examples/dpo/pairs.py"), str(world.data / f"{part}.jsonl"), str(pairs)]
    run([vime()[0], *made], world.root / "pairs.out")
    return str(pairs)


def evaluations(world: World, name: str) -> dict[int, dict[str, float]]:
    """Returns the metrics of the held-out set, by the number of trained rollouts."""
    return {
        step: {key.removeprefix("eval/held-out/"): value for key, value in row.items() if "/held-out/" in key}
        for step, row in rows(world.root / name, "eval/step").items()
    }


def dpo(world: World, name: str, *flags: str) -> str:
    """Runs the example with more flags and returns its output."""
    pairs, held_out = table_rows(world, "train"), table_rows(world, "test")
    command = vime(
        *("train", "--config", str(ROOT / "examples/dpo/dpo.yaml"), "--hf-checkpoint", str(world.model)),
        *("--prompt-data", pairs, "--run-dir", str(world.root / name)),
        *("--eval-prompt-data", "held-out", held_out, *flags),
    )
    return run(command, world.root / f"{name}.out")


@pytest.mark.slow
def test_the_example_learns_to_prefer(world: World) -> None:
    printed = dpo(world, "example", "--eval-interval", "10")
    assert "step: ref_log_probs (reference) -> train policy\n" in printed
    steps = [row for _, row in sorted(rows(world.root / "example", "train/step").items())]
    loss, right = ([row[f"train/{name}"] for row in steps] for name in ("loss", "rewards/accuracies"))
    print([round(x, 2) for x in loss], [round(x, 2) for x in right])
    # log 2, because the policy is the reference
    assert len(loss) == 20 and loss[0] == pytest.approx(0.693, abs=1e-3)
    # each row is seen once, so no row was trained on before
    assert loss[-1] < 0.3 and right[-1] > 0.95
    held_out = evaluations(world, "example")
    assert list(held_out) == [0, 10, 20]
    assert held_out[0]["loss"] == pytest.approx(0.693, abs=1e-3)
    assert held_out[0]["loss"] > 2 * held_out[10]["loss"] > 2 * held_out[20]["loss"]
    assert held_out[20]["rewards/accuracies"] > 0.95
    assert held_out[20]["rewards/margins"] == pytest.approx(
        held_out[20]["rewards/chosen"] - held_out[20]["rewards/rejected"], abs=1e-5
    )
    assert " held_acc " in printed and "eval at step 20:  held-out/loss " in printed
    assert f"best evaluation: held-out/loss {held_out[20]['loss']:.4g} after 20 rollouts\n" in printed


@pytest.mark.slow
def test_evaluations_change_no_training_and_go_on_after_a_resume(world: World) -> None:
    """Two ranks and one rank give equal evaluations. The last step is evaluated, and a resumed run evaluates again."""
    short = ("--num-rollout", "4", "--eval-interval", "2")
    dpo(world, "plain", "--num-rollout", "4")
    dpo(world, "whole", *short)
    whole = evaluations(world, "whole")
    assert list(whole) == [0, 2, 4] and not evaluations(world, "plain")
    trained = [rows(world.root / name, "train/step") for name in ("plain", "whole")]
    plain, same = (
        [{k: x for k, x in row.items() if k != "time"} for _, row in sorted(run.items())] for run in trained
    )
    assert len(plain) == 4 and plain == same
    save = str(world.root / "dpo-save")
    for rollouts in ("2", "4"):
        dpo(world, "parts", *short, "--save", save, "--load", save, "--num-rollout", rollouts)
    assert evaluations(world, "parts") == whole
    dpo(world, "two", *short, "--actor-num-gpus-per-node", "2")
    for step, figures in evaluations(world, "two").items():
        assert figures == pytest.approx(whole[step], rel=1e-4, abs=1e-6), step


@pytest.mark.slow
def test_a_reward_model_is_for_transformers(world: World) -> None:
    hf = world.root / "reward"
    kind = ("--loss-type", "reward_model", "--num-rollout", "10", "--eval-interval", "5")
    dpo(world, "reward-run", *kind, "--save", str(world.root / "ckpt"), "--save-hf", str(hf))
    steps = [row for _, row in sorted(rows(world.root / "reward-run", "train/step").items())]
    assert steps[0]["train/loss"] == pytest.approx(0.693, abs=1e-3) and steps[-1]["train/loss"] < 0.3
    held_out = evaluations(world, "reward-run")
    assert held_out[0]["loss"] == pytest.approx(0.693, abs=1e-3) and held_out[10]["loss"] < 0.3
    assert held_out[10]["rewards/accuracies"] > 0.95
    model = transformers.AutoModelForSequenceClassification.from_pretrained(hf)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    scores = []
    for answer in ("46", "It is 46."):
        chat = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            scores.append(float(model(ids).logits))
    assert scores[0] > scores[1] + 0.5
