"""Two trainer ranks over gloo against one: the same metrics, the same weights, the same published file.

The worker processes run every layout in turn and write what they got; the tests compare it with a single rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_cases as cases
from safetensors.torch import load_file
from trainer_cases import exported, make_config, make_samples, rank_data

from slime.megatron_backend.trainer import MegatronTrainer

POLICY_FLAGS = {
    # two optimizer steps, every term of the loss that crosses ranks
    "global_batch_size": 4,
    "max_tokens_per_gpu": 24,
    "balance_data": True,
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "normalize_advantages": True,
    "use_tis": True,
}
CUSTOM_FLAGS = {"loss_type": "custom_loss", "custom_loss_function_path": "trainer_cases.reinforce_loss"}
TENSOR = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": POLICY_FLAGS,
    "dp-per-token": POLICY_FLAGS | {"calculate_per_token_loss": True, "use_distributed_optimizer": False},
    "tp": POLICY_FLAGS | TENSOR,
    "sp": POLICY_FLAGS | TENSOR | {"sequence_parallel": True},
    "tp-custom": CUSTOM_FLAGS | TENSOR,
    "dp-native": POLICY_FLAGS | {"rlk_fast": "off"},
    "tp-native": POLICY_FLAGS | TENSOR | {"rlk_fast": "off"},
    "sp-native": POLICY_FLAGS | TENSOR | {"sequence_parallel": True, "rlk_fast": "off"},
    "sp-linear_logp": POLICY_FLAGS | TENSOR | {"sequence_parallel": True, "rl_kernel_ops": ["linear_logp"]},
    "sp-logp": POLICY_FLAGS | TENSOR | {"sequence_parallel": True, "rl_kernel_ops": ["logp"]},
}
SINGLE = {"policy": POLICY_FLAGS, "per-token": LAYOUTS["dp-per-token"], "custom": CUSTOM_FLAGS}
SAME_AS = {"dp-per-token": "per-token", "tp-custom": "custom"}
"""All others are compared with one rank that takes the one-pass operator."""


def run(name: str, flags: dict[str, Any], root: Path, rank: int, ranks: int) -> dict[str, Any]:
    """One rollout with all its steps; what this rank reports, holds and publishes."""
    config = make_config(root, weight_dir=str(root / f"weights-{name}"), **flags)
    trainer = MegatronTrainer(config, rank, ranks, init_method=f"file://{root}/store-{name}", local_rank=rank)
    info = trainer.info
    data = rank_data(config, make_samples(), info.dp_rank, info.dp_size)
    samples = len(data["tokens"])
    result = trainer.train(0, data)
    update = trainer.publish_weights(1, checksums=True)
    out = {
        "steps": result.steps,
        "rollout": result.rollout,
        "samples": samples,
        "weights": exported(trainer),
        "path": update and update.info["path"],
        "checksums": update and update.checksums,
    }
    trainer.close()
    return out


def work(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    out = {name: run(name, flags, root, rank, 2) for name, flags in LAYOUTS.items()}
    out["tp-custom"]["logits"] = cases.CALLS[0][2]
    torch.save(out, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def one(root):
    return {name: run(f"one-{name}", flags, root, 0, 1) for name, flags in SINGLE.items()}


@pytest.fixture(scope="module")
def two(root, one):
    torch.multiprocessing.spawn(work, args=(root,), nprocs=2)
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one(one, two, layout):
    wanted = one[SAME_AS.get(layout, "policy")]
    for rank in (0, 1):
        got = two[rank][layout]
        assert len(got["steps"]) == len(wanted["steps"])
        for a, b in zip(got["steps"], wanted["steps"], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
        assert got["rollout"] == pytest.approx(wanted["rollout"], rel=1e-4, abs=1e-6)
        for name, tensor in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][name], tensor, rtol=0, atol=1e-5, msg=name)
            assert torch.equal(got["weights"][name], two[0][layout]["weights"][name]), name


def test_the_steps_moved_the_weights(root, one):
    """By far more than the tolerance of the comparison above."""
    start = load_file(root / "policy/model.safetensors")
    for result in one.values():
        assert all((t - start[n]).abs().max() > 1e-3 for n, t in result["weights"].items() if t.dim() > 1)


def test_data_parallel_ranks_share_the_samples(one, two):
    assert one["policy"]["samples"] == 9
    assert [sum(r[layout]["samples"] for r in two) for layout in ("dp", "tp")] == [9, 18]
    assert min(r["dp"]["samples"] for r in two) >= 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_publishes_the_whole_model(two, layout):
    assert two[1][layout]["path"] is None
    published = load_file(two[0][layout]["path"])
    assert published.keys() == two[0][layout]["checksums"].keys()
    for name, tensor in two[0][layout]["weights"].items():
        assert torch.equal(published[name], tensor), name


def test_custom_loss_sees_its_part_of_the_vocabulary(two):
    """99 entries are padded to 256 = 2 x 128; the padding has no part in the softmax (compared above)."""
    assert [r["tp-custom"]["logits"][1] for r in two] == [128, 128]
