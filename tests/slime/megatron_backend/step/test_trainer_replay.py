"""Tests a trainer with routing replay: its experts, its metrics, and ranks of every kind compared with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cases import tiny_checkpoint
from rank_processes import on_ranks
from trainer_cases import exported, make_config, make_samples, rank_data

from slime.algo.needs import needs_old_log_probs
from slime.megatron_backend.step.replay import replay_log_probs
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.tracking.metrics import EXPERTS_DIFFER as DIFFER

EXPERTS, TOPK, LAYERS = 4, 2, 2
ENGINE = {"use_rollout_routing_replay": True}
OWN = {"use_routing_replay": True}
TWO_STEPS = {"global_batch_size": 4}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "pp-full": {"pipeline_model_parallel_size": 2, "overrides": FULL},
    "ep": {"expert_model_parallel_size": 2},
    "ep-sp": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replay")
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "moe_intermediate_size": 24}
    for name in ("policy", "reference"):
        tiny_checkpoint(
            root / name,
            "qwen3_moe",
            num_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            num_hidden_layers=LAYERS,
            **shape,
        )
    return root


def routed_samples() -> list[Any]:
    """Returns samples with random experts for all tokens."""
    samples, generator = make_samples(), np.random.default_rng(0)
    for sample in samples:
        scores = generator.random((len(sample.tokens) - 1, LAYERS, EXPERTS))
        sample.rollout_routed_experts = scores.argsort(-1)[..., :TOPK].astype(np.uint8)
    return samples


def trained(root: Path, name: str, rank: int = 0, ranks: int = 1, **flags: Any) -> dict[str, Any]:
    directories = {"weight_dir": str(root / f"weights-{name}"), "max_tokens_per_gpu": 24}
    config = make_config(root, actor_num_gpus_per_node=ranks, **directories | flags)
    trainer = MegatronTrainer(config, rank, ranks, init_method=f"file://{root}/store-{name}", local_rank=rank)
    data = rank_data(config, routed_samples(), trainer.info.dp_rank, trainer.info.dp_size)
    result = trainer.train(0, data)
    out = {"steps": result.steps, "weights": exported(trainer), "old": data.get("old_log_probs")}
    out["places"] = data["sample_indices"]
    out["kept"] = len(trainer.replay._recorded)
    trainer.close()
    return out


def test_the_engines_experts_are_trained_with(root):
    plain, replayed = trained(root, "plain"), trained(root, "engine", **ENGINE)
    assert DIFFER not in plain["steps"][0]
    # Random pairs of four experts differ in five of six cases.
    assert 0.7 < replayed["steps"][0][DIFFER] < 0.95
    losses = [run["steps"][0]["train/train_rollout_logprob_abs_diff"] for run in (plain, replayed)]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert replayed["old"] is None  # one step needs no pass for old log-probs


def test_its_own_record_is_the_policy_that_was_and_differs_once_weights_move(root):
    plain = trained(root, "plain-two", **TWO_STEPS, lr=20.0)
    replayed = trained(root, "own-two", **TWO_STEPS, **OWN, lr=20.0)
    first, second = replayed["steps"]
    assert first == {**plain["steps"][0], DIFFER: 0.0}
    assert second[DIFFER] > 0 and second["train/loss"] != plain["steps"][1]["train/loss"]
    assert replayed["kept"] == 0


def test_its_own_record_needs_the_pass_that_makes_it(root):
    assert needs_old_log_probs(make_config(root, **OWN))
    assert not needs_old_log_probs(make_config(root, **ENGINE))
    assert not needs_old_log_probs(make_config(root, **OWN, **ENGINE))
    replayed = trained(root, "own-one", **OWN)
    assert len(replayed["old"]) == 9 and replayed["steps"][0][DIFFER] == 0.0
    assert replayed["steps"][0]["train/ppo_kl"] == 0.0


def test_saved_samples_are_looked_at_with_their_experts(root, one):
    """An audit of a file computes the same numbers as the trainer did for the same samples."""
    samples, config = routed_samples(), make_config(root, max_tokens_per_gpu=24, **ENGINE)
    layouts = {"alone": [[i] for i in range(9)], "packed": [[8, 1, 2], [0, 3, 4, 5], [6, 7]]}
    found = replay_log_probs(config, str(root / "policy"), samples, layouts)
    for values in found.values():
        for place, old in zip(one["engine"]["places"], one["engine"]["old"], strict=True):
            torch.testing.assert_close(values[place], old, rtol=0, atol=1e-5)
    samples[3].rollout_routed_experts = None
    with pytest.raises(ValueError, match="got none for sample 3"):
        replay_log_probs(config, str(root / "policy"), samples, layouts)


def work(rank: int, root: Path) -> None:
    found = {}
    for name, flags in LAYOUTS.items():
        for kind, replay in (("engine", ENGINE), ("own", OWN)):
            found[name, kind] = trained(
                root, f"{name}-{kind}", rank, 2, **TWO_STEPS, **replay, lr=20.0, **flags
            )
    torch.save(found, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def one(root):
    return {
        kind: trained(root, f"one-{kind}", **TWO_STEPS, **replay, lr=20.0)
        for kind, replay in (("engine", ENGINE), ("own", OWN))
    }


@pytest.fixture(scope="module")
def two(root, one):
    on_ranks(work, root, ranks=2)
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("kind", ["engine", "own"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_replay_as_one(one, two, layout, kind):
    for rank in two:
        got, wanted = rank[layout, kind], one[kind]
        assert kind == "engine" or got["steps"][0][DIFFER] == 0.0
        for a, b in zip(got["steps"], wanted["steps"], strict=True):
            share, expected = a[DIFFER], b[DIFFER]
            # Experts that ranks share have separate groups.
            names = [name for name in b if name != DIFFER and "lr-pg" not in name]
            assert [a[name] for name in names] == pytest.approx(
                [b[name] for name in names], rel=1e-3, abs=1e-5
            )
            # Rows of padding choose for themselves in the trainer's own record, and are counted there.
            assert share == pytest.approx(expected, abs=0 if kind == "engine" else 0.05)
        for name, tensor in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][name], tensor, rtol=0, atol=1e-4, msg=name)
