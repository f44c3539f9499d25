"""Compares a critic on two and four ranks over gloo with one rank: equal values, metrics and weights of policy and
critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from torch import Tensor
from trainer_cases import exported, make_config, make_samples, rank_data

from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.gpt import last_part
from slime.megatron_backend.step.trainer import MegatronTrainer

PPO = {
    "advantage_estimator": "ppo",
    "global_batch_size": 4,  # two optimizer steps
    "max_tokens_per_gpu": 24,
    "gamma": 0.95,
    "lambd": 0.9,
    "kl_coef": 0.1,
    "normalize_advantages": True,
    "critic_lr": 0.1,
    "value_clip": 0.05,
    "clip_grad": 0.5,
}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
CONTEXT = {"context_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}
EMPTY = {"use_dynamic_batch_size": False, "micro_batch_size": 1}
TWO: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": TENSOR,
    "sp": SEQUENCE,
    "cp": CONTEXT,
    "pp": STAGES,
    "cp-empty": CONTEXT | EMPTY,
    "dp-per-token": {"calculate_per_token_loss": True},
}
FOUR: dict[str, dict[str, Any]] = {
    "pp-sp": STAGES | SEQUENCE,
    "pp-cp": STAGES | CONTEXT,
    "cp-tp": CONTEXT | TENSOR,
    "cp-dp": CONTEXT,
    "pp-dp": STAGES,
}
SINGLE = {"ppo": {}, "empty": EMPTY, "per-token": TWO["dp-per-token"]}
SHORT = {"sp", "pp"}
"""The layouts of the short suite; the others run with --all."""

LAYOUTS = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.slow, id=name) for name in (*TWO, *FOUR)
]


def same_as(layout: str) -> str:
    return next((name for name in SINGLE if name in layout), "ppo")


def critic_weights(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Returns the critic's weights under HF names and its head; stages without the head have no head."""
    critic = trainer.models.learners["critic"].model
    weights = {name: tensor.cpu().clone() for name, tensor in export_hf(critic)}
    head = getattr(last_part(critic), "value_head", None)
    return weights if head is None else weights | {"value_head": head.weight.detach().clone()}


def run(
    name: str, flags: dict[str, Any], root: Path, rank: int, ranks: int, load: str = ""
) -> dict[str, Any]:
    """Runs two rollouts from a head that is not 0, with a checkpoint between them, or the second from the checkpoint
    `load`."""
    given = PPO | flags | {"weight_dir": str(root / f"weights-{name}"), "save": str(root / f"save-{name}")}
    if load:
        given["load"] = str(root / f"save-{load}")
    config = make_config(root, actor_num_gpus_per_node=ranks, **given)
    store = f"file://{root}/store-{name}-{load}"
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    info, out, critic = trainer.info, dict[str, Any](), trainer.models.learners["critic"]
    head = getattr(last_part(critic.model), "value_head", None)
    if not load:
        if head is not None:
            head.weight.data.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(3)) / 8)
        critic.optimizer.reload_model_params()
    assert trainer.start_rollout_id == bool(load)
    for rollout_id in range(bool(load), 2):
        data = rank_data(config, make_samples(rollout_id), info.dp_rank, info.dp_size)
        result = trainer.train(rollout_id, data)
        out[f"steps-{rollout_id}"], out[f"rollout-{rollout_id}"] = result.steps, result.rollout
        out[f"values-{rollout_id}"] = dict(zip(data["sample_indices"], data["values"], strict=True))
        if not rollout_id:
            trainer.save(0)
    out["policy"], out["critic"] = exported(trainer), critic_weights(trainer)
    trainer.close()
    return out


def work(rank: int, root: Path, ranks: int, chosen: set[str]) -> None:
    found = {}
    for name, flags in {2: TWO, 4: FOUR}[ranks].items():
        if name in chosen:
            found[name] = run(name, flags, root, rank, ranks)
            if same_as(name) == "ppo":
                found[f"{name}-resumed"] = run(name, flags, root, rank, ranks, load="one-ppo")
    torch.save(found, root / f"rank{rank}-of-{ranks}.pt")


@pytest.fixture(scope="module")
def one(root):
    return {name: run(f"one-{name}", flags, root, 0, 1) for name, flags in SINGLE.items()}


@pytest.fixture(scope="module")
def several(request, root, one):
    everything = any(item.get_closest_marker("slow") for item in request.session.items)
    chosen = {*TWO, *FOUR} if everything else SHORT
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4) if everything else (2,):
        on_ranks(work, root, ranks, chosen, ranks=ranks)
        parts = [torch.load(root / f"rank{rank}-of-{ranks}.pt") for rank in range(ranks)]
        found |= {layout: [part[layout] for part in parts] for layout in parts[0]}
    return found


def assert_same(got: dict[str, Any], wanted: dict[str, Any], first: int = 0) -> None:
    for rollout_id in range(first, 2):
        for a, b in zip(got[f"steps-{rollout_id}"], wanted[f"steps-{rollout_id}"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        assert got[f"rollout-{rollout_id}"] == pytest.approx(
            wanted[f"rollout-{rollout_id}"], rel=1e-4, abs=1e-5
        )
        for i, values in got[f"values-{rollout_id}"].items():
            torch.testing.assert_close(values, wanted[f"values-{rollout_id}"][i], rtol=0, atol=1e-5)
    for model in ("policy", "critic"):
        for name, tensor in got[model].items():
            torch.testing.assert_close(tensor, wanted[model][name], rtol=0, atol=1e-5, msg=f"{model} {name}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_ranks_train_as_one(one, several, layout):
    for got in several[layout]:
        assert_same(got, one[same_as(layout)])


@pytest.mark.parametrize("layout", [p for p in LAYOUTS if same_as(str(p.id)) == "ppo"])
def test_a_checkpoint_of_one_rank_fits(one, several, layout):
    for got in several[f"{layout}-resumed"]:
        assert_same(got, one["ppo"], first=1)


def test_a_checkpoint_of_several_ranks_fits_one(root, one, several):
    assert_same(run("one-again", {}, root, 0, 1, load="pp"), one["ppo"], first=1)


def test_the_steps_moved_both_models(one):
    for result in one.values():
        steps = [*result["steps-0"], *result["steps-1"]]
        assert all(step["train/critic-grad_norm"] > 1e-3 and step["train/grad_norm"] > 1e-3 for step in steps)
        assert steps[1]["train/critic-value_clipfrac"] > 0
        assert any(
            not torch.equal(result["policy"][name], t)
            for name, t in result["critic"].items()
            if name in result["policy"]
        )
