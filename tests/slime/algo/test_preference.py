"""Tests DPO on the trainer: loss and metrics of pairs by hand, compared with transformers, and several ranks compared
with one."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron_cases import VOCAB
from rank_processes import on_ranks
from safetensors.torch import load_file
from trainer_cases import exported, hf_log_probs, make_config, rank_data

from slime.megatron_backend.model.gpt import last_part
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.operators import loss_head
from slime.rollout.sft_rollout import _score_all
from slime.types import Sample

DPO = {
    "loss_type": "dpo",
    "rollout_function_path": "slime.rollout.sft_rollout.generate_pairs",
    "n_samples_per_prompt": 1,
    "rollout_batch_size": 8,
    "dpo_beta": 0.5,
    "max_tokens_per_gpu": 48,
}


def make_pairs(seed: int = 0, pairs: int = 8) -> list[Sample]:
    """Returns chosen and rejected responses of different lengths to the same prompt, with gaps in their masks."""
    rng = random.Random(seed)
    samples = []
    for index in range(pairs):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 6))]
        for sign in (1.0, -1.0):
            length = rng.randint(3, 9)
            samples.append(
                Sample(
                    index=index,
                    group_index=index,
                    rollout_id=index,
                    tokens=[*prompt, *(rng.randrange(VOCAB) for _ in range(length))],
                    response_length=length,
                    loss_mask=[1, *(int(rng.random() < 0.8) for _ in range(length - 1))],
                    columns={"preference": [sign] * length},
                    reward=0.0,
                    status=Sample.Status.COMPLETED,
                )
            )
    return samples


def log_ratios(root: Path, samples: list[Sample]) -> list[float]:
    """Returns, per sample, the sum over its trained tokens of the log-prob minus the reference's log-prob."""
    models = [transformers.AutoModelForCausalLM.from_pretrained(root / n) for n in ("policy", "reference")]
    found = []
    for sample in samples:
        with torch.no_grad():
            new, ref = (hf_log_probs(model, sample, 1.0)[0] for model in models)
        found.append(float(((new - ref) * torch.tensor(sample.loss_mask)).sum()))
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_first_loss_by_hand(root, build, smoothing):
    trainer = build(**DPO, dpo_label_smoothing=smoothing)
    assert list(trainer.models) == ["policy", "reference"]
    assert loss_head(trainer.config)[1] == "--loss-type dpo looks at whole sequences"
    samples = make_pairs()
    data = rank_data(trainer.config, samples)
    assert len(data.micro_batches) > 1 and all(len(b) % 2 == 0 for b in data.micro_batches)
    got = trainer.train(0, data)
    ratios = log_ratios(root, samples)
    wanted = dict.fromkeys(("loss", "chosen", "rejected", "margins", "accuracies"), 0.0)
    for chosen, rejected in zip(ratios[0::2], ratios[1::2], strict=True):
        z = 0.5 * (chosen - rejected)
        wanted["loss"] += (1 - smoothing) * math.log1p(math.exp(-z)) + smoothing * math.log1p(math.exp(z))
        wanted["chosen"] += 0.5 * chosen
        wanted["rejected"] += 0.5 * rejected
        wanted["margins"] += z
        wanted["accuracies"] += z > 0
    step = got.steps[0]
    assert step["train/loss"] == pytest.approx(wanted.pop("loss") / 8, rel=1e-4)
    for name, value in wanted.items():
        assert step[f"train/rewards/{name}"] == pytest.approx(value / 8, rel=1e-4, abs=1e-5), name
    assert step["train/global_batch_size"] == 8 and "rollout/ref_log_probs" in got.rollout


def test_the_gradient_is_that_of_the_formula(root, build):
    """Adam with a large epsilon moves a weight by lr * gradient, like one step of SGD."""
    trainer = build(**DPO)
    before = exported(trainer)
    samples = make_pairs()
    trainer.train(0, rank_data(trainer.config, samples))
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    reference = log_ratios(root, samples)
    terms = []
    for sample, known in zip(samples, reference, strict=True):
        new, _ = hf_log_probs(model, sample, 1.0)
        summed = (new * torch.tensor(sample.loss_mask)).sum()
        terms.append(summed - summed.detach() + known)
    z = 0.5 * (torch.stack(terms[0::2]) - torch.stack(terms[1::2]))
    torch.nn.functional.softplus(-z).mean().backward()
    name = "model.layers.1.mlp.down_proj.weight"
    grad = dict(model.named_parameters())[name].grad
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5
    grad = grad * min(1.0, 1.0 / norm)  # --clip-grad is 1
    moved = before[name] - exported(trainer)[name]
    torch.testing.assert_close(moved, 0.5 * grad / (grad.abs() + 1), rtol=0, atol=1e-5)


def test_training_prefers_the_chosen_responses(build):
    trainer = build(**DPO, lr=1e-2, adam_eps=1e-8)
    steps = [trainer.train(i, rank_data(trainer.config, make_pairs())).steps[0] for i in range(4)]
    losses = [step["train/loss"] for step in steps]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.2 and losses[0] > 0.6
    assert steps[-1]["train/rewards/accuracies"] == 1.0


def test_samples_that_are_no_pairs_are_an_error(build):
    trainer = build(**DPO)
    samples = make_pairs()
    samples[0].columns["preference"] = [-1.0] * samples[0].response_length
    with pytest.raises(
        ValueError, match="must have chosen and rejected samples in turn, got .*generate_pairs"
    ):
        trainer.train(0, rank_data(trainer.config, samples))


LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "dp-static": {"use_dynamic_batch_size": False, "micro_batch_size": 2, "balance_data": True},
}
SHORT = ["sp", "dp"]


def run(root: Path, flags: dict[str, Any], rank: int, ranks: int, name: str) -> dict[str, Any]:
    """Runs two rollouts of two optimizer steps each."""
    given = DPO | flags | {"global_batch_size": 4}
    reward = given["loss_type"] == "reward_model"
    if reward:
        given |= {"save": str(root / f"save-{name}-{ranks}"), "save_hf": str(root / f"hf-{name}-{ranks}")}
    config = make_config(root, actor_num_gpus_per_node=ranks, **given)
    store = f"file://{root}/store-{given['loss_type']}-{name}-{ranks}"
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    if reward:
        with_head(trainer)
    steps = []
    for i in range(2):
        pairs = scored(make_pairs(i)) if reward else make_pairs(i)
        data = rank_data(config, pairs, trainer.info.dp_rank, trainer.info.dp_size)
        steps += trainer.train(i, data).steps
    out: dict[str, Any] = {"steps": steps, "weights": exported(trainer)}
    if reward:
        trainer.save(1)
        out["score"] = load_file(root / f"hf-{name}-{ranks}/model.safetensors")["score.weight"]
    trainer.close()
    return out


def work(rank: int, root: Path, names: list[str], reward: bool = False) -> None:
    kind = REWARD if reward else {}
    found = {name: run(root, LAYOUTS[name] | kind, rank, 2, name) for name in names}
    torch.save(found, root / f"dpo-{rank}.pt")


@pytest.mark.parametrize(
    "names",
    [SHORT, pytest.param([name for name in LAYOUTS if name not in SHORT], marks=pytest.mark.slow)],
    ids=["short", "every"],
)
def test_two_ranks_train_as_one(root, names):
    one = run(root, {}, 0, 1, "-".join(names))
    on_ranks(work, root, names, ranks=2)
    for rank in range(2):
        for name, got in torch.load(root / f"dpo-{rank}.pt").items():
            for a, b in zip(got["steps"], one["steps"], strict=True):
                assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name
            for key, tensor in got["weights"].items():
                torch.testing.assert_close(
                    tensor, one["weights"][key], rtol=0, atol=1e-5, msg=f"{name} {key}"
                )


REWARD = DPO | {"loss_type": "reward_model", "debug_train_only": True}


def with_head(trainer: MegatronTrainer) -> None:
    """Sets a head that is not 0."""
    head = getattr(last_part(trainer.policy.model), "value_head", None)
    if head is not None:
        head.weight.data.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(3)) / 4)
    trainer.policy.optimizer.reload_model_params()


def scored(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        _score_all(sample)
        sample.columns["preference"].append(sample.columns["preference"][0])
    return samples


def test_a_reward_model_by_hand_and_in_transformers(build, tmp_path):
    """The directory of --save-hf gives the scores of the loss."""
    out = tmp_path / "hf"
    trainer = build(**REWARD, save=str(tmp_path / "save"), save_hf=str(out), lr=0.0)
    assert list(trainer.models) == ["policy"] and loss_head(trainer.config)[0].name == "value head"
    first = trainer.train(0, rank_data(trainer.config, scored(make_pairs()))).steps[0]
    assert first["train/loss"] == pytest.approx(math.log(2)) and first["train/rewards/accuracies"] == 0
    with_head(trainer)
    step = trainer.train(1, rank_data(trainer.config, scored(make_pairs()))).steps[0]
    trainer.save(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert type(model).__name__ == "Qwen3ForSequenceClassification" and model.config.num_labels == 1
    with torch.no_grad():
        scores = [float(model(torch.tensor([s.tokens])).logits) for s in make_pairs()]
    pairs = list(zip(scores[0::2], scores[1::2], strict=True))
    wanted = {
        "loss": sum(math.log1p(math.exp(b - a)) for a, b in pairs),
        "rewards/chosen": sum(a for a, _ in pairs),
        "rewards/margins": sum(a - b for a, b in pairs),
        "rewards/accuracies": sum(a > b for a, b in pairs),
    }
    for name, value in wanted.items():
        assert step[f"train/{name}"] == pytest.approx(value / 8, rel=1e-4, abs=1e-5), name
    assert max(scores) - min(scores) > 0.5


def test_a_reward_model_learns_and_becomes_a_critic(build, tmp_path):
    trainer = build(**REWARD, lr=1e-2, adam_eps=1e-8, save=str(tmp_path / "save"))
    steps = [trainer.train(i, rank_data(trainer.config, scored(make_pairs()))).steps[0] for i in range(4)]
    assert steps[-1]["train/loss"] < 0.3 and steps[-1]["train/rewards/accuracies"] == 1.0
    trainer.save(3)
    weight = last_part(trainer.policy.model).value_head.weight.detach().clone()
    critic = build(advantage_estimator="ppo", critic_load=str(tmp_path / "save")).models.learners["critic"]
    assert torch.equal(last_part(critic.model).value_head.weight, weight)


@pytest.mark.parametrize(
    "names",
    [["sp"], pytest.param(["dp", "tp", "cp", "pp"], marks=pytest.mark.slow)],
    ids=["short", "every"],
)
def test_a_reward_model_on_two_ranks(root, names):
    one = run(root, REWARD, 0, 1, "reward-" + "-".join(names))
    on_ranks(work, root, names, True, ranks=2)
    for rank in range(2):
        for name, got in torch.load(root / f"dpo-{rank}.pt").items():
            for a, b in zip(got["steps"], one["steps"], strict=True):
                assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name
            for key, tensor in got["weights"].items():
                torch.testing.assert_close(
                    tensor, one["weights"][key], rtol=0, atol=1e-5, msg=f"{name} {key}"
                )
            saved = load_file(root / f"hf-{name}-2/model.safetensors")["score.weight"]
            torch.testing.assert_close(saved, one["score"], rtol=0, atol=1e-5)


def test_a_reference_of_its_own_is_noted(root):
    """--ref-load also gives the policy's first weights, unless --load names some. DPO would then train its
    reference."""

    def noted(**flags: Any) -> list[str]:
        notes = make_config(root, loss_type="dpo", **flags).notes
        return [note for note in notes if "first weights" in note]

    (note,) = noted(load=None)
    assert note.startswith(f"--ref-load {root / 'reference'} also gives the policy's first weights")
    assert note.endswith(f"add --load {root / 'policy'}")
    assert noted() == noted(load=None, ref_load=None) == []
    assert not any("first weights" in note for note in make_config(root, load=None).notes)  # GRPO
