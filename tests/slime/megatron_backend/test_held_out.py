"""Compares the loss of held-out samples in real Megatron with transformers, with training, and between rank layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_processes import on_ranks
from torch.nn.functional import logsigmoid
from trainer_cases import exported, hf_log_probs, make_config, make_samples, rank_data

from slime.checkpoints.hf_config import read_hf_config
from slime.config.hook_calls import Hooks
from slime.data.train_data import checked_data, held_out_data
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample

SFT = {"loss_type": "sft_loss", "calculate_per_token_loss": True}
DPO = {"loss_type": "dpo", "n_samples_per_prompt": 1, "dpo_beta": 0.3}
DPO["rollout_function_path"] = "slime.rollout.sft_rollout.generate_pairs"
REWARD = {**DPO, "loss_type": "reward_model", "debug_train_only": True}
del REWARD["dpo_beta"]
KINDS = {"sft": SFT, "sft-of-samples": {"loss_type": "sft_loss"}, "dpo": DPO, "reward": REWARD}
SHARED = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def given_samples(kind: str, seed: int = 0) -> list[Sample]:
    """Returns conversations, or 5 pairs: responses of different lengths, with gaps in their masks."""
    samples = make_samples(seed)
    for sample in samples:
        sample.rollout_log_probs = sample.reward = sample.rollout_id = None
        sample.remove_sample = False
    if kind.startswith("sft"):
        return samples[:7]
    pairs = [*samples, copy.deepcopy(samples[2])]
    for i, sample in enumerate(pairs):
        sample.index, sample.rollout_id = i, i // 2
        sample.columns["preference"] = [1.0 - 2 * (i % 2)] * sample.response_length
    return pairs


def sets(trainer: MegatronTrainer, kind: str, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Returns a rank's data for two held-out sets: all samples, and the first sample or pair."""
    config = trainer.config
    hf_config = read_hf_config(config.rollout.hf_checkpoint)
    samples, found = given_samples(kind), {}
    for name, some in (("all", samples), ("first", samples[: 1 if kind.startswith("sft") else 2])):
        data = checked_data(config, Hooks(config), some, hf_config)
        found[name] = held_out_data(config, data, ranks, hf_config)[rank]
    return found


def by_transformers(root: Path, kind: str) -> dict[str, float]:
    """Computes the metrics in plain PyTorch over the same samples, one by one."""
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(root / name) for name in ("policy", "reference")
    )
    sums, samples = [], given_samples(kind)
    with torch.no_grad():
        for sample in samples:
            mask = torch.tensor(sample.loss_mask)
            ours, theirs = (hf_log_probs(model, sample, 1.0)[0] * mask for model in (policy, reference))
            sums.append((ours.sum(), theirs.sum(), mask.sum()))
    ours, theirs, tokens = (torch.stack(parts) for parts in zip(*sums, strict=True))
    if kind == "sft":
        return {"loss": float(-ours.sum() / tokens.sum())}
    if kind == "sft-of-samples":
        return {"loss": float(-(ours / tokens).mean())}
    z = 0.3 * (ours - theirs)
    margins = z[0::2] - z[1::2]
    return {
        "loss": float(-logsigmoid(margins).mean()),
        "rewards/margins": float(margins.mean()),
        "rewards/accuracies": float((margins > 0).float().mean()),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_losses_are_those_of_training_and_of_transformers(root, build, kind):
    """The losses also equal the first step over the same samples, whose loss is computed before its update."""
    samples = given_samples(kind)
    rollouts = len(samples) if kind.startswith("sft") else len(samples) // 2
    trainer = build(**KINDS[kind], global_batch_size=rollouts, rollout_batch_size=rollouts)
    found = trainer.evaluate(0, sets(trainer, kind))
    if kind != "reward":
        for name, value in by_transformers(root, kind).items():
            assert found[f"eval/all/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    step = trainer.train(0, rank_data(trainer.config, samples)).steps[0]
    shared = [name for name in SHARED if f"train/{name}" in step]
    assert len(shared) == (1 if kind.startswith("sft") else 5)
    for name in shared:
        assert found[f"eval/all/{name}"] == pytest.approx(step[f"train/{name}"], rel=1e-5, abs=1e-6), name
    assert {name.rpartition("eval/first/")[2] for name in found if "/first/" in name} == set(shared)
    assert trainer.evaluate(1, sets(trainer, kind))["eval/all/loss"] != pytest.approx(found["eval/all/loss"])


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_training_is_the_same_with_and_without_evaluations(build, kind):
    """Metrics and weights are equal to the last bit, with dropout, which uses the random state."""
    flags = {**KINDS[kind], "global_batch_size": 2, "overrides": {"hidden_dropout": 0.1}}
    flags["rollout_batch_size"] = 6 if kind == "sft" else 4
    runs = []
    for evaluates in (False, True):
        trainer, results = build(**flags), []
        for rollout_id in range(3):
            if evaluates:
                state = torch.get_rng_state()
                trainer.evaluate(rollout_id, sets(trainer, kind))
                assert torch.equal(torch.get_rng_state(), state)
            size = flags["rollout_batch_size"] * (1 if kind == "sft" else 2)
            result = trainer.train(
                rollout_id, rank_data(trainer.config, given_samples(kind, rollout_id)[:size])
            )
            operators = {
                name: value for name, value in result.perf.items() if name.endswith(("/calls", "/tokens"))
            }
            results.append((result.steps, result.rollout, operators))
        runs.append((results, exported(trainer)))
    (without, before), (with_evaluations, after) = runs
    assert without == with_evaluations
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


CONTEXT, STAGES = {"context_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STATIC = {"use_dynamic_batch_size": False, "micro_batch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sft dp": SFT,
    "sft dp static": SFT | STATIC,
    "sft cp": SFT | CONTEXT,
    "sft pp": SFT | STAGES,
    "dpo dp": DPO,
    "dpo sp": DPO | SEQUENCE,
    "dpo cp": DPO | CONTEXT,
    "dpo pp": DPO | STAGES,
    "reward dp": REWARD,
    "reward cp": REWARD | CONTEXT,
    "reward pp": REWARD | STAGES,
}
"""Sizes of the sets: 7 conversations or 5 pairs, and one. No number of ranks divides them."""
SHORT = ("sft dp", "sft dp static", "dpo dp", "dpo pp", "reward cp")


def evaluated(layout: str, root: Path, rank: int, ranks: int) -> dict[str, float]:
    flags, store = LAYOUTS[layout], f"file://{root}/held-out-{layout.replace(' ', '-')}-{ranks}"
    if ranks == 1:
        flags = {name: value for name, value in flags.items() if name not in CONTEXT | STAGES | SEQUENCE}
    config = make_config(root, actor_num_gpus_per_node=ranks, rollout_batch_size=8, **flags)
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    data = sets(trainer, layout.split()[0], trainer.info.dp_rank, trainer.info.dp_size)
    found = trainer.evaluate(0, data)
    found["micro-batches"] = len(data["all"].micro_batches)
    trainer.close()
    return found


def work(rank: int, root: Path, layouts: list[str]) -> None:
    torch.save({name: evaluated(name, root, rank, 2) for name in layouts}, root / f"held-out-{rank}.pt")


@pytest.fixture(scope="module")
def several(request, root):
    """Returns layout -> metrics, for each of two ranks."""
    slow = any(item.get_closest_marker("slow") for item in request.session.items)
    on_ranks(work, root, list(LAYOUTS) if slow else list(SHORT), ranks=2)
    return [torch.load(root / f"held-out-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=() if x in SHORT else pytest.mark.slow, id=x) for x in LAYOUTS]
)
def test_two_ranks_give_the_losses_of_one(root, several, layout):
    wanted = evaluated(layout, root, 0, 1)
    whole = wanted.pop("micro-batches")
    first, second = (rank[layout] for rank in several)
    assert first == second
    each = first.pop("micro-batches")
    assert each == (-(-whole // 2) if " dp" in layout else whole) or "cp" in layout
    assert first == pytest.approx(wanted, rel=1e-9 if " dp" in layout else 1e-5, abs=1e-7)
