"""Compares two processes with experts with one: tensor (and sequence), data and expert parallel, and their
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import make_config, sequences, tiny_checkpoint, train_step
from rank_processes import on_ranks
from torch import Tensor

from slime.checkpoints.hf_config import read_hf_config
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

LR = 1e-3
LAYOUTS: dict[str, dict[str, Any]] = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp": {},
    "ep": {"expert_model_parallel_size": 2},
    "ep-sp": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [0]},
    "glm4_moe": {"first_k_dense_replace": 1},
}


def trainer(hf_dir: Path, config: Any) -> tuple:
    model = build_model(read_hf_config(hf_dir), config)
    load_hf(model, hf_dir)
    return model, *build_optimizer(model, config, total_steps=10)


def two_steps(parts: tuple, info: Any) -> dict[str, Any]:
    logs = []
    for step in (0, 1):
        # There are 32 tokens, because sequence parallelism needs a multiple of the ranks.
        mine = [*sequences(step), torch.tensor([1, 2, 3])][info.dp_rank :: info.dp_size]
        logs.append(train_step(*parts, mine, tp_group=info.tp_group if info.tp_size > 1 else None))
    return {"logs": logs, "weights": exported(parts[0])}


def exported(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in export_hf(model)}


def work(rank: int, root: Path) -> None:
    out: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        config = make_config(lr=LR, **layout)
        info = init_parallel(rank, 2, config, init_method=f"file://{root}/store-{name}", local_rank=rank)
        parts = trainer(root / "moe", config)
        before = exported(parts[0])
        out[name] = two_steps(parts, info) | {"before": before}
        expert = unwrap(parts[0]).decoder.layers[1].mlp.experts.local_experts[-1]
        out[name]["shapes"] = [tuple(x.weight.shape) for x in (expert.linear_fc1, expert.linear_fc2)]
        save_checkpoint(root / f"from-{name}", 2, *parts)
        destroy_parallel()
    out["pp"] = stages(rank, root)
    torch.save(out, root / f"rank{rank}.pt")


def stages(rank: int, root: Path) -> dict[str, Any]:
    """Layer 0 is dense and on the first stage, layer 1 has experts and is on the second stage."""
    config = make_config(pipeline_model_parallel_size=2)
    init_parallel(rank, 2, config, init_method=f"file://{root}/store-pp", local_rank=rank)
    model = build_model(read_hf_config(root / "moe"), config, ddp=False)
    load_hf(model, root / "moe")
    kinds = [type(layer.mlp).__name__ for layer in unwrap(model).decoder.layers]
    found = {"before": exported(model), "kinds": kinds}
    rounded = make_config(pipeline_model_parallel_size=2, params_dtype="bfloat16")
    model = build_model(read_hf_config(root / "moe"), rounded, ddp=False)
    load_hf(model, root / "moe")
    found["rounded"] = exported(model)
    destroy_parallel()
    return found


@pytest.fixture(scope="module", params=[pytest.param("qwen3_moe", marks=pytest.mark.slow), "glm4_moe"])
def root(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    tiny_checkpoint(root / "moe", request.param, tie_word_embeddings=False, **KINDS[request.param])
    return root


@pytest.fixture(scope="module")
def one(root):
    """Runs the same steps on a single rank, which stays up for the tests."""
    config = make_config(lr=LR)
    info = init_parallel(0, 1, config, init_method=f"file://{root}/store-one")
    parts = trainer(root / "moe", config)
    before = exported(parts[0])
    yield two_steps(parts, info) | {"before": before}
    destroy_parallel()


@pytest.fixture(scope="module")
def two(root, one):
    on_ranks(work, root, ranks=2)
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one(one, two, layout):
    wanted, norms = torch.tensor(one["logs"]).unbind(-1)
    got = torch.tensor([rank[layout]["logs"] for rank in two])  # [rank, step, (loss, norm)]
    losses = got[..., 0].sum(0) if layout in ("dp", "ep") else got[0, :, 0]
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(got[..., 1], norms.expand(2, 2), rtol=1e-4, atol=0)
    for name, tensor in one["weights"].items():
        first, second = (rank[layout]["weights"][name] for rank in two)
        assert torch.equal(first, second), name
        # Adam turns the sign of a rounding error in a gradient near zero into at most one rate per step.
        difference = (first - tensor).abs()
        assert difference.max() < 2.5 * LR, name
        if name.endswith(
            "k_proj.bias"
        ):  # without rotation it adds one number to all logits of a query, so it has no gradient
            difference = difference.unflatten(0, (-1, 32))[:, :16]
        assert (difference > 1e-5).float().mean() < 0.01, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_put_together_bitwise(one, two, layout):
    assert two[0][layout]["shapes"] == ([(48, 64), (64, 24)] if layout == "sp" else [(96, 64), (64, 48)])
    for rank in two:
        assert rank[layout]["before"].keys() == one["before"].keys()
        assert all(torch.equal(t, one["before"][n]) for n, t in rank[layout]["before"].items())


def test_pipeline_stages_have_the_layers_of_their_numbers(one, two):
    assert [rank["pp"]["kinds"] for rank in two] == [["GatedMLP"], ["ExpertLayer"]]
    for rank in two:
        assert rank["pp"]["before"].keys() == one["before"].keys()
        assert all(torch.equal(t, one["before"][n]) for n, t in rank["pp"]["before"].items())
        for name, tensor in rank["pp"]["rounded"].items():  # the bias of GLM's router stays in fp32
            kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            assert tensor.dtype == kept and torch.equal(tensor, one["before"][name].to(kept)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_of_two_ranks_loads_on_one(root, one, two, layout):
    parts = trainer(root / "moe", make_config(lr=LR))
    load_checkpoint(root / f"from-{layout}", *parts)
    for name, tensor in exported(parts[0]).items():
        assert torch.equal(tensor, two[0][layout]["weights"][name]), name
