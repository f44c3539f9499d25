"""Trainer ranks that share experts, over gloo, compared with one rank: metrics, gradient norm, weights, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import exported, make_checkpoints, make_config, make_samples, rank_data

from slime.megatron_backend.model.gpt import unwrapped
from slime.megatron_backend.parallel import destroy_parallel
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params

FLAGS = {
    # There are two optimizer steps, and the norm over experts and all other weights is clipped.
    "global_batch_size": 4,
    "max_tokens_per_gpu": 24,
    "balance_data": True,
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.1,
    "clip_grad": 0.05,
    "lr": 5.0,
}
EXPERTS = {"expert_model_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}
VIRTUAL = STAGES | {"num_virtual_stages_per_pipeline_rank": 2}
HEAD_ALONE = STAGES | {
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
    "num_layers_per_virtual_pipeline_stage": 1,
}
TWO: dict[str, dict[str, Any]] = {
    "dp": {},
    "sp": SEQUENCE,
    "cp": {"context_parallel_size": 2},
    "pp": STAGES,
    "pp-string": STAGES | {"pipeline_model_parallel_layout": "Et|t*3,L"},
    "vpp": VIRTUAL,
    "vpp-string": STAGES | {"pipeline_model_parallel_layout": "E|tt|t|tL"},
    "vpp-head-alone": HEAD_ALONE,
    "vpp-overlap": VIRTUAL | {"overrides": {"overlap_grad_reduce": True}},
    "etp": {"expert_tensor_parallel_size": 2},
    "sp-whole-experts": SEQUENCE | {"expert_tensor_parallel_size": 1},
    "ep": EXPERTS,
    "ep-overlap": EXPERTS | {"overrides": {"overlap_grad_reduce": True}},
    "ep-plain": EXPERTS | {"use_distributed_optimizer": False},
    "ep-sp": EXPERTS | SEQUENCE | {"expert_tensor_parallel_size": 1},
    "ep-cp": EXPERTS | {"context_parallel_size": 2},
}
FOUR: dict[str, dict[str, Any]] = {
    "ep-sp-dp": EXPERTS | SEQUENCE | {"expert_tensor_parallel_size": 1},
    "ep-pp": EXPERTS | STAGES,
    "ep-vpp": EXPERTS | VIRTUAL,
    "vpp-sp": VIRTUAL | SEQUENCE,
    "ep-etp-sp": EXPERTS | SEQUENCE | {"expert_tensor_parallel_size": 2},
}
SHORT = {"ep", "ep-plain", "ep-vpp", "ep-etp-sp"}
"""The layouts of the short suite: each kind of parallelism once; the others run with --all."""


def layouts(*without: str) -> list[Any]:
    """Returns parameters for the layouts whose names contain none of these words."""
    return [
        pytest.param(name, marks=() if name in SHORT else pytest.mark.slow, id=name)
        for name in (*TWO, *FOUR)
        if not any(word in name for word in without)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model whose layer 0 is dense, so that two stages have different numbers of experts."""
    root = tmp_path_factory.mktemp("experts")
    shape = {"num_experts": 4, "moe_intermediate_size": 24, "num_hidden_layers": 4, "mlp_only_layers": [0]}
    make_checkpoints(root, "qwen3_moe", **shape)
    return root


def started(root: Path, name: str, rank: int, ranks: int, flags: dict[str, Any]) -> MegatronTrainer:
    directories = {"weight_dir": str(root / f"weights-{name}"), "save": str(root / f"save-{name}")}
    config = make_config(root, actor_num_gpus_per_node=ranks, **directories | FLAGS | flags)
    return MegatronTrainer(config, rank, ranks, init_method=f"file://{root}/store-{name}", local_rank=rank)


def rollout(trainer: MegatronTrainer, number: int) -> Any:
    info = trainer.info
    data = rank_data(trainer.config, make_samples(number), info.dp_rank, info.dp_size)
    return trainer.train(number, data)


def whole(root: Path, name: str, rank: int, ranks: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Runs a rollout, publishes, saves a checkpoint, and runs the rollout after it."""
    trainer = started(root, name, rank, ranks, flags)
    start = exported(trainer)
    result = rollout(trainer, 0)
    update = trainer.next_weights(1, {})
    assert trainer.next_weights(1, {}) is None
    out = {
        "start": start,
        "steps": result.steps,
        "weights": exported(trainer),
        "path": update.info.get("path"),
        "params": {
            f"{part}.{name}": p.numel()
            for part, inner in enumerate(unwrapped(trainer.policy.model))
            for name, p in inner.named_parameters()
        },
        "estimate": [params for _, params, *_ in rank_params(trainer.config, Shape.of(trainer.hf_config))],
    }
    trainer.save(0)
    rollout(trainer, 1)
    out["next"] = exported(trainer)
    trainer.close()
    return out


def resumed(root: Path, name: str, saved: str, rank: int, ranks: int) -> dict[str, Tensor]:
    flags = (TWO | FOUR).get(name, {}) | {"load": str(root / f"save-{saved}")}
    trainer = started(root, f"{name}-from-{saved}", rank, ranks, flags)
    assert trainer.start_rollout_id == 1
    rollout(trainer, 1)
    weights = exported(trainer)
    trainer.close()
    return weights


def work(rank: int, root: Path, ranks: int, chosen: set[str]) -> None:
    cases = {name: flags for name, flags in {2: TWO, 4: FOUR}[ranks].items() if name in chosen}
    out = {name: whole(root, name, rank, ranks, flags) for name, flags in cases.items()}
    for name in cases:
        if "plain" not in name:
            out[name]["resumed"] = resumed(root, name, "one", rank, ranks)
    torch.save(out, root / f"rank{rank}-of-{ranks}.pt")


@pytest.fixture(scope="module")
def one(root: Path) -> dict[str, Any]:
    return whole(root, "one", 0, 1, {})


@pytest.fixture(scope="module")
def several(
    request: pytest.FixtureRequest, root: Path, one: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    everything = any(item.get_closest_marker("slow") for item in request.session.items)
    chosen = {*TWO, *FOUR} if everything else SHORT
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        on_ranks(work, root, ranks, chosen, ranks=ranks)
        parts = [torch.load(root / f"rank{rank}-of-{ranks}.pt") for rank in range(ranks)]
        found |= {layout: [part[layout] for part in parts] for layout in parts[0]}
    return found


@pytest.mark.parametrize("layout", layouts())
def test_ranks_train_as_one(root, one, several, layout):
    """The test compares metrics with the clipped norm, weights, and rank 0's published weights."""
    for got in several[layout]:
        for a, b in zip(got["steps"], one["steps"], strict=True):
            assert b["train/grad_norm"] > 2 * FLAGS["clip_grad"]
            compared = {
                name: a[name] for name in b if "lr-pg" not in name
            }  # shared experts have separate groups
            assert compared == pytest.approx({name: b[name] for name in compared}, rel=1e-4, abs=1e-6)
        assert got["start"].keys() == got["weights"].keys() == one["weights"].keys()
        for name, tensor in one["weights"].items():
            assert torch.equal(got["start"][name], one["start"][name]), name
            torch.testing.assert_close(got["weights"][name], tensor, rtol=0, atol=1e-5, msg=name)
            assert torch.equal(got["weights"][name], several[layout][0]["weights"][name]), name
    published = load_file(several[layout][0]["path"])
    assert all(torch.equal(published[name], t) for name, t in several[layout][0]["weights"].items())


def test_the_steps_moved_the_weights(one):
    """The weights moved by far more than the tolerance of the comparison above."""
    moved = {n: (t - one["start"][n]).abs().max() for n, t in one["weights"].items() if t.dim() > 1}
    assert min(moved.values()) > 1e-4, moved


@pytest.mark.parametrize("layout", layouts("plain"))
def test_checkpoints_fit_other_layouts(root, one, several, layout):
    """Several ranks continue one rank's checkpoint, and one rank continues theirs. All equal one rank without
    a stop."""
    by_one = resumed(root, "one", layout, 0, 1)
    for name, wanted in one["next"].items():
        for got in (by_one, several[layout][0]["next"], several[layout][-1]["resumed"]):
            torch.testing.assert_close(got[name], wanted, rtol=0, atol=1e-5, msg=name)


def test_an_optimizer_that_is_not_distributed_needs_the_same_experts(root, several):
    with pytest.raises(ValueError, match="--expert-model-parallel-size must be above 1 where it was"):
        flags = {"use_distributed_optimizer": False, "load": str(root / "save-ep-plain")}
        started(root, "one-plain", 0, 1, flags)
    destroy_parallel()  # a trainer that was built would have done so


@pytest.mark.parametrize("layout", layouts("pp"))
def test_estimate_counts_what_ranks_have(one, several, layout):
    """The estimate counts the elements of matrices exactly, for experts and for other weights. The table pads no
    vocabulary, and has no norms."""
    for got in (one, *several[layout]):
        experts = sum(n for name, n in got["params"].items() if "local_experts" in name)
        norms = sum(n for name, n in got["params"].items() if "norm" in name)
        split = 2 if "sp" in layout and got is not one else 1
        padding = (128 * split - 99) * 32 / split
        assert got["estimate"] == [sum(got["params"].values()) - experts - norms - padding, experts]
