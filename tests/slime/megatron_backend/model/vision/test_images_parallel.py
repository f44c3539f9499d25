"""Compares models with vision tower on two processes with transformers: loss, gradients and the bytes of weights, with
tensor, sequence, context, pipeline and data parallelism.

Two worker processes run all layouts and models in turn and write their results; the tests compare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_cases import CASES
from megatron_cases import BATCH_TOKENS, assert_gradients_equal, hf_gradients, make_config, tiny_checkpoint
from rank_processes import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from tower_cases import KEYS, image_logits, make_samples, read_vision

import rl_kernel
from slime.data.packing import MicroBatch, pack
from slime.megatron_backend.checkpoint.own_slices import OwnSlices
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model, gather_hidden, output_weight, unwrapped, vocab_range
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import finish_grads
from slime.megatron_backend.parallel import ParallelInfo, destroy_parallel, init_parallel
from slime.megatron_backend.step.pipeline import run_stages
from slime.tracking.timers import Timers

MODELS = ("qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3-5", "gemma3-vl")
DEEP = {"num_hidden_layers": 4}
"""The first of two stages must have the layers that get rows of images."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "dp": {"overrides": {"overlap_grad_reduce": True}},
}


SHORT = {
    "qwen2-5-vl": {"tp", "cp"},
    "qwen3-vl": {"sp", "pp"},
    "qwen3-vl-moe": {"ep"},
    "qwen3-5": {"sp", "dp"},
    "gemma3-vl": {"tp"},
}
"""Layouts of the short suite: each layout with one model, and each model with a split layer."""


def fits(name: str, layout: str) -> bool:
    """Layouts of dense models have no experts to split. Models with experts run only where ranks split experts. Ranks
    may not cut the images of a Gemma 3."""
    if name == "gemma3-vl" and layout == "cp":
        return False
    return layout in ("sp", "ep") if name.endswith("moe") else layout != "ep"


CASES_OF_TWO = [
    pytest.param(name, layout, marks=() if layout in SHORT[name] else pytest.mark.slow, id=f"{name}-{layout}")
    for name in MODELS
    for layout in LAYOUTS
    if fits(name, layout)
]


def work(rank: int, root: Path, everything: bool) -> None:
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for layout, sizes in LAYOUTS.items():
        # With the distributed optimizer, a data-parallel rank would have only its part of the gradients.
        config = make_config(
            **sizes, multimodal_keys=KEYS, train_vision=True, use_distributed_optimizer=False
        )
        info = init_parallel(rank, 2, config, init_method=f"file://{root}/store-{layout}", local_rank=rank)
        for name in (n for n in MODELS if fits(n, layout) and (everything or layout in SHORT[n])):
            out[name, layout] = one_model(root / name, config, info)
        destroy_parallel()
    torch.save(out, root / f"rank{rank}.pt")


def one_model(directory: Path, config: Any, info: ParallelInfo) -> dict[str, Any]:
    """Runs a step over two micro-batches on this rank. With data parallelism, only rank 0 has images."""
    model, vision = build_model(load_hf_config(directory), config), read_vision(directory)
    load_hf(model, directory)
    weights = {name: tensor.clone() for name, tensor in export_hf(model)}
    data = make_samples(vision)
    parts = [[0, 2], [3, 1]] if info.dp_size == 1 else [[[0, 2, 3], [1]][info.dp_rank]]

    def packed(samples: list[int]) -> MicroBatch:
        return pack(
            *(data, samples, []),
            device=info.device,
            multiple=info.tp_size,
            cp_rank=info.cp_rank,
            cp_size=info.cp_size,
            vision=vision,
            has_tower=info.pp_rank == 0,
        )

    def on_output(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor]:
        hidden = gather_hidden(model, output)[batch.rows]
        start, size = vocab_range(model)
        shard = {
            "vocab_start": start,
            "vocab_size": size,
            "tp_group": info.tp_group if info.tp_size > 1 else None,
        }
        loss = (
            -rl_kernel.linear_logp(hidden, output_weight(model), batch.targets, **shard).sum() / BATCH_TOKENS
        )
        return loss, loss.detach()

    losses = run_stages(model, info, map(packed, parts), len(parts), on_output, Timers())
    finish_grads(model)
    loss = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.all_reduce(loss)
    slices = [(x.position.name, x.position.where, x.values().clone()) for x in OwnSlices(model)()]
    for part in unwrapped(model):
        for parameter in part.parameters():
            parameter.data = parameter.main_grad.clone()
    gradients = {name: tensor.clone() for name, tensor in export_hf(model)}
    return {
        "weights": weights,
        "loss": loss.item() / info.tp_size,
        "gradients": gradients,
        "slices": slices,
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Returns the directory of the tiny models, and transformers' models."""
    root = tmp_path_factory.mktemp("towers")
    cases = {name: CASES[name] for name in MODELS}
    return root, {
        name: tiny_checkpoint(root / name, case.kind, **(case.shape | DEEP)) for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, models: tuple[Path, dict[str, Any]]
) -> list[dict[tuple[str, str], dict[str, Any]]]:
    everything = any(item.get_closest_marker("slow") for item in request.session.items)
    on_ranks(work, models[0], everything, ranks=2)
    return [torch.load(models[0] / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def wanted(models: tuple[Path, dict[str, Any]]) -> Callable[[str], tuple[float, dict[str, Tensor]]]:
    """Returns a function that returns the loss and the gradients of transformers' model."""
    return functools.cache(functools.partial(by_transformers, models))


def by_transformers(models: tuple[Path, dict[str, Any]], name: str) -> tuple[float, dict[str, Tensor]]:
    root, hfs = models
    hf, data = hfs[name], make_samples(read_vision(root / name))
    loss = torch.zeros(())
    for i, tokens in enumerate(data["tokens"]):
        one = {key: [column[i]] for key, column in data.items()}
        log_probs = image_logits(hf, one).log_softmax(-1)[:-1].gather(1, tokens[1:, None])
        loss = loss - log_probs[-data["response_lengths"][i] :].sum() / BATCH_TOKENS
    loss.backward()
    return loss.item(), hf_gradients(hf, root / f"{name}-gradients")


@pytest.mark.parametrize(("name", "layout"), CASES_OF_TWO)
def test_two_ranks_train_as_transformers(wanted: Any, two: Any, name: str, layout: str) -> None:
    loss, gradients = wanted(name)
    for found in (of_rank[name, layout] for of_rank in two):
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        for key, gradient in found["gradients"].items():
            assert_gradients_equal(gradient, gradients[key], key)


@pytest.mark.parametrize(("name", "layout"), CASES_OF_TWO)
def test_weights_of_two_ranks_are_put_together(models: Any, two: Any, name: str, layout: str) -> None:
    """An update has each value once: whole tensors by `export_hf`, and the ranks' own slices together."""
    original = load_file(models[0] / name / "model.safetensors")
    count = dict.fromkeys(original, 0)
    for found in (of_rank[name, layout] for of_rank in two):
        assert found["weights"].keys() == original.keys()
        assert all(torch.equal(tensor, original[key]) for key, tensor in found["weights"].items())
        for key, where, values in found["slices"]:
            part = original[key][tuple(slice(start, end) for start, end in where)]
            assert torch.equal(part.flatten(), values.flatten()), f"{key} {where}"
            count[key] += values.numel()
    assert count == {key: tensor.numel() for key, tensor in original.items()}
