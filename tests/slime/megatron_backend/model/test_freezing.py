"""Freezing by name: the trained weights move, no other weights move, and two ranks agree with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import VOCAB, make_config, sequences, tiny_checkpoint, train_step
from rank_processes import on_ranks

from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model, get_parts, unwrap
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models.selection import Selection
from slime.plan.model_shape import Shape
from slime.plan.trained_params import list_end_matrices, trained_params

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("frozen")
    tiny_checkpoint(root / "qwen3")
    tiny_checkpoint(root / "untied", tie_word_embeddings=False)
    tiny_checkpoint(root / "qwen3_moe", "qwen3_moe", **EXPERTS)
    return root


@pytest.fixture
def one(root, tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


def trainer(hf_dir: Path, **values: Any) -> tuple:
    config = make_config(**{"lr": 1e-2, **values})
    model = build_model(load_hf_config(hf_dir), config)
    load_hf(model, hf_dir)
    return model, *build_optimizer(model, config, total_steps=10)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in export_hf(model)}


def moved(hf_dir: Path, **values: Any) -> tuple[set[str], tuple]:
    """Returns the HF names of the tensors that two steps change."""
    parts = trainer(hf_dir, **values)
    before = weights(parts[0])
    for step in range(2):
        train_step(*parts, sequences(step))
    after = weights(parts[0])
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}, parts


LAYER_1 = "model.layers.1."
CASES = {
    "qwen3": [
        ({"freeze_params_name_list": ["embedding"]}, lambda name: "embed_tokens" not in name),
        ({"only_train_params_name_list": [r"layers\.1\."]}, lambda name: name.startswith(LAYER_1)),
        (
            {"only_train_params_name_list": [r"layers\.1\.mlp", "final_layernorm"]},
            lambda name: name.startswith(f"{LAYER_1}mlp") or name == "model.norm.weight",
        ),
        ({"freeze_params_name_list": [r"linear_(qkv|proj)\.", "norm"]}, lambda name: "embed" in name or "mlp." in name),
    ],
    "untied": [
        ({"only_train_params_name_list": ["output_layer"]}, lambda name: name == "lm_head.weight"),
        ({"freeze_params_name_list": ["output_layer"]}, lambda name: name != "lm_head.weight"),
    ],
    "qwen3_moe": [
        ({"freeze_params_name_list": [r"router\."]}, lambda name: not name.endswith("mlp.gate.weight")),
        ({"only_train_params_name_list": [r"experts\.2\."]}, lambda name: ".experts.2." in name),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, i) for kind, cases in CASES.items() for i in range(len(cases))]
)
@pytest.mark.parametrize(
    "more", [{}, {"optimizer_cpu_offload": True}, {"overrides": FULL}], ids=["", "host", "recomputed"]
)
def test_only_what_is_trained_moves(root, one, kind, case, more):
    """Only trained weights have gradients, moments and main weights."""
    flags, is_trained = CASES[kind][case]
    found, parts = moved(root / kind, **flags, **more)
    assert found == {name for name in weights(parts[0]) if is_trained(name)}
    inner = unwrap(parts[0])
    trained = sum(p.numel() for p in inner.parameters() if p.requires_grad)
    assert 0 < trained < sum(p.numel() for p in inner.parameters())
    assert all(hasattr(p, "main_grad") == p.requires_grad for p in inner.parameters())
    buffers = [*get_parts(parts[0])[0].buffers, *get_parts(parts[0])[0].expert_parallel_buffers]
    assert trained <= sum(buffer.grad_data.numel() for buffer in buffers) <= trained + 1024 * len(buffers)
    state = [s for c in parts[1].chained_optimizers if c.optimizer for s in c.optimizer.state.values()]
    assert sum(s["exp_avg"].numel() for s in state) == trained


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, i) for kind, cases in CASES.items() for i in range(len(cases))]
)
def test_plan_counts_the_same_matrices(root, one, kind, case):
    flags, _ = CASES[kind][case]
    hf, config = load_hf_config(root / kind), make_config(**flags)
    inner = unwrap(build_model(hf, config))
    matrices = {name: p for name, p in inner.named_parameters() if p.dim() == 2 and p.requires_grad}
    ends = (
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    )  # the plan does not count the vocabulary's padding
    real = sum((VOCAB if name in ends else p.shape[0]) * p.shape[1] for name, p in matrices.items())
    shape = Shape.of(hf)
    found = trained_params(
        Selection.of(config), shape, range(shape.layers), list_end_matrices(shape, first=True, last=True)
    )
    assert found.total == real


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"only_train_params_name_list": ["vision"]}, "--only-train-params-name-list must match .*'vision'"),
        ({"freeze_params_name_list": ["mlp", "vision"]}, "--freeze-params-name-list must match .*'vision'"),
        ({"freeze_params_name_list": ["weight"]}, "--freeze-params-name-list must leave .* got weight, which"),
        ({"only_train_params_name_list": ["layer", "emb"]}, "--only-train-params-name-list must leave .* got layer"),
    ],
)  # fmt: skip
def test_lists_that_fit_badly_are_refused(root, one, flags, message):
    with pytest.raises(ValueError, match=message):
        trainer(root / "qwen3", **flags)


@pytest.mark.slow
def test_a_run_with_frozen_parameters_resumes(root, one, tmp_path):
    flags = {"freeze_params_name_list": ["embedding", r"layers\.0\."]}
    whole = trainer(root / "qwen3", **flags)
    expected = [train_step(*whole, sequences(step)) for step in range(4)]
    part = trainer(root / "qwen3", **flags)
    got = [train_step(*part, sequences(step)) for step in range(2)]
    save_checkpoint(tmp_path / "saved", 2, *part)
    resumed = trainer(root / "qwen3", **flags)
    load_checkpoint(tmp_path / "saved", *resumed)
    assert got + [train_step(*resumed, sequences(step)) for step in (2, 3)] == expected
    other = trainer(root / "qwen3")  # it trains more weights than the checkpoint has moments for
    with pytest.raises(ValueError, match="must hold the tensors of this model and optimizer"):
        load_checkpoint(tmp_path / "saved", *other)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "dp": {},
}


def work(rank: int, root: Path) -> None:
    out: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        config = make_config(freeze_params_name_list=[r"layers\.1\.mlp", "embedding"], **layout)
        init_parallel(rank, 2, config, init_method=f"file://{root}/store-{name}", local_rank=rank)
        model = build_model(load_hf_config(root / "qwen3"), config)
        out[name] = {
            n: p.requires_grad for part in get_parts(model) for n, p in unwrap(part).named_parameters()
        }
        if name == "pp":
            only = make_config(only_train_params_name_list=[r"layers\.1\."], **layout)
            with pytest.raises(
                ValueError, match="leave a trained parameter on every rank, got none on rank 0"
            ):
                build_model(load_hf_config(root / "qwen3"), only)
        destroy_parallel()
    torch.save(out, root / f"names{rank}.pt")


def test_ranks_number_layers_as_the_whole_model(root):
    """Layer 1 is layer 0 of the second pipeline stage; a tied head is frozen with the embedding there."""
    on_ranks(work, root, ranks=2)
    found = [torch.load(root / f"names{rank}.pt") for rank in (0, 1)]
    for layout in ("tp", "dp"):
        for of_rank in found:
            frozen = {name for name, trains in of_rank[layout].items() if not trains}
            assert frozen == {
                "embedding.word_embeddings.weight",
                "decoder.layers.1.mlp.linear_fc1.weight",
                "decoder.layers.1.mlp.linear_fc2.weight",
            }
    first, second = ({name for name, trains in of_rank["pp"].items() if not trains} for of_rank in found)
    assert first == {"embedding.word_embeddings.weight"}
    assert second == {
        "output_layer.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
    }
