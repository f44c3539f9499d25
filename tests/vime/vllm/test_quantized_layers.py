"""Compares the checks of quantised checkpoints with layers of the installed vLLM: which lists of modules it reads, and
which shapes it loads."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from quantization_cases import FP8, INT4, KIMI_IGNORED
from rank_processes import on_ranks

from slime.models.quantized.quantization import QuantizationScheme, dequantize, quantize, read_scheme
from vime.vllm.quantized.layers import EngineLayer, EngineReading, engine_layers
from vime.vllm.quantized.rules import EngineSplit, find_misfit, misfits

DENSE = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}
EXPERTS = {"model_type": "qwen3_moe", "hidden_act": "silu", **ARCHITECTURES["qwen3-30b-a3b"].config_fields()}
ATTENTION, GATE, DOWN = "model.layers.0.self_attn", "model.layers.0.mlp.gate", "model.layers.0.mlp.down_proj"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def scheme(config: dict[str, Any]) -> QuantizationScheme:
    found = read_scheme({"quantization_config": config})
    assert found is not None
    return found


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["lm_head", "model.layers.0.mlp.gate"],
        [f"{ATTENTION}.{x}_proj" for x in "qkv"],
        [f"{ATTENTION}.{x}_proj" for x in "qk"],
        [f"{ATTENTION}.qkv_proj", f"{ATTENTION}.o_proj"],
        ["self_attn", ATTENTION, "o_proj", "re:.*self_attn.*"],
        [f"{GATE}_up_proj"],
        [f"{GATE}_proj"],
        [DOWN, "re:.*(gate|up)_proj"],
        [r"re:.*mlp\.gate_up_proj$"],
        [r"re:.*layers\.0\.mlp\..*", "model.layers.0.mlp.experts.3.gate_proj"],
        KIMI_IGNORED,
    ],
)
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_lists_of_modules_are_read_as_vllm_reads_them(model: dict[str, Any], names: list[str]) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    def of_vllm(layer: EngineLayer, method: str) -> bool | None:
        """None means that vLLM raises an error, because only a part of the layer is quantised."""
        name = layer.modules[0].rpartition(".0.")[0] if layer.is_expert and method == "fp8" else layer.name
        try:
            if method == "fp8":
                return is_layer_skipped(name, names, PACKED)
            return should_ignore_layer(name, names, PACKED)
        except ValueError:
            return None

    config = {"fp8": FP8 | {"modules_to_not_convert": names}, "int4": INT4 | {"ignore": names}}
    for form in config.values():
        reading = EngineReading(scheme(form))
        for layer in list(engine_layers(model, 1))[:4]:
            found = set(reading.ignored(layer))
            mine = None if len(found) > 1 else found.pop()
            assert mine is of_vllm(layer, scheme(form).method), layer.name


SHAPES = [  # hidden size, head size, heads, heads of keys and values, width of the MLP
    (128, 64, 4, 2, 256),
    (128, 64, 4, 1, 384),
    (128, 128, 4, 1, 192),
    (128, 128, 4, 2, 512),
    (128, 64, 3, 3, 96),
    (200, 64, 8, 4, 128),
    (128, 192, 4, 2, 640),
]


def dense(shape: tuple[int, ...]) -> dict[str, Any]:
    names = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return DENSE | dict(zip(names, shape, strict=True)) | {"num_hidden_layers": 1}


def load_all(rank: int, ranks: int, root: Path) -> None:
    """Loads all shapes into layers of vLLM. Saves (number of the shape, layer's name) -> whether all
    values of this rank are right."""
    # With a name per rank, vLLM makes no shared memory, which it would leave behind.
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= environment | {"VLLM_DIST_IDENT": f"rank-{rank}", "VLLM_HOST_IP": "127.0.0.1"}
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    from vime.vllm import patches

    patches.apply("worker on CPUs")
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False)  # type: ignore[assignment]
    found: dict[tuple[int, str], bool] = {}
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{root}/store{ranks}", rank, backend="gloo")
        initialize_model_parallel(ranks)
        for number, shape in enumerate(SHAPES):
            for layer in engine_layers(dense(shape), ranks) if shape[2] % ranks == 0 else ():
                found[number, layer.name] = loads(layer, shape, rank, ranks)
    torch.save(found, root / f"{ranks}-{rank}.pt")
    cleanup_dist_env_and_memory()


def loads(layer: EngineLayer, shape: tuple[int, ...], rank: int, ranks: int) -> bool:
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    hidden, size, heads, groups, _ = shape
    form: dict[str, Any] = {
        "bias": False,
        "quant_config": Fp8Config(weight_block_size=[128, 128]),
        "prefix": layer.name,
        "params_dtype": torch.bfloat16,
    }
    attention = layer.name.endswith("qkv_proj")
    stored = (heads * size, groups * size, groups * size) if attention else layer.rows
    weights = [torch.randn(rows, layer.columns) for rows in stored]
    wanted = []
    for weight in weights:
        plain = dequantize(quantize(weight, scheme(FP8)), scheme(FP8))
        split = max(1, min(ranks, groups if attention and len(wanted) else ranks))
        wanted.append(plain.chunk(split, int(layer.split == "columns"))[rank * split // ranks])
    try:
        if attention:
            made: Any = QKVParallelLinear(hidden, size, heads, groups, **form)
        elif layer.split == "columns":
            made = RowParallelLinear(layer.columns, layer.rows[0], **form)
        else:
            made = MergedColumnParallelLinear(hidden, list(layer.rows), **form)
        parts: list[Any] = ["q", "k", "v"] if attention else list(range(len(weights)))
        for part, weight in zip(parts, weights, strict=True):
            for name, tensor in quantize(weight, scheme(FP8)).items():
                parameter = getattr(made, name)
                parameter.weight_loader(parameter, tensor, *([part] if len(parts) > 1 else []))
        return torch.equal(dequantize(dict(made.named_parameters()), scheme(FP8)), torch.cat(wanted))
    except (ValueError, RuntimeError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shape_is_refused_if_vllm_cannot_load_it(tmp_path: Path, ranks: int) -> None:
    """vLLM raises an error for some shapes. Other shapes get wrong scales without an error."""
    on_ranks(load_all, ranks, tmp_path, ranks=ranks)
    found = [torch.load(tmp_path / f"{ranks}-{rank}.pt") for rank in range(ranks)]
    answers = set()
    for number, name in found[0]:
        engine = EngineSplit(ranks, 1, False)
        (layer,) = (x for x in engine_layers(dense(SHAPES[number]), ranks) if x.name == name)
        fits = not list(misfits(layer, scheme(FP8), engine))
        assert fits is all(rank[number, name] for rank in found), (SHAPES[number], name)
        answers.add(fits)
    assert answers == {True, False}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [64, 96, 128, 192, 768, 1536, 2048, 144])
@pytest.mark.parametrize("hidden", [2048, 144])
def test_experts_are_refused_if_vllm_cannot_refine_their_blocks(ranks: int, width: int, hidden: int) -> None:
    """The oldest vLLM refines no blocks."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    refine = getattr(fp8, "refine_fp8_moe_block_shape", None)
    each = width // ranks
    sizes: Any = SimpleNamespace(
        intermediate_size_per_partition=each, tp_size=ranks, hidden_dim=hidden, intermediate_size=width
    )
    whole = each % 128 == 0
    loads = whole or (refine is not None and refine(sizes, [128, 128]) is not None)
    shape = EXPERTS | {"moe_intermediate_size": width, "hidden_size": hidden, "num_hidden_layers": 1}
    (layer, _) = (x for x in engine_layers(shape, ranks) if x.is_expert)
    assert (not list(misfits(layer, scheme(FP8), EngineSplit(ranks, 1, False)))) is loads
    assert (not list(misfits(layer, scheme(FP8), EngineSplit(ranks, 1, True)))) is (
        width % 128 == 0 or (refine is not None and width % 32 == 0 and hidden % 32 == 0)
    )


def test_int4_needs_whole_groups_of_columns_on_a_rank() -> None:
    """vLLM does the same check in `verify_group_size_divides_partition` and in its experts."""
    int4 = scheme(INT4)
    assert find_misfit(dense((128, 64, 4, 2, 192)), int4, EngineSplit(2, 1, False)) is None
    found = find_misfit(dense((128, 64, 4, 2, 96)), int4, EngineSplit(2, 1, False))
    assert str(found) == "96 columns / 2 = 48 in model.layers.0.mlp.down_proj"
    shape = EXPERTS | {"moe_intermediate_size": 96, "num_hidden_layers": 1}
    assert "experts.0.down_proj" in str(find_misfit(shape, int4, EngineSplit(2, 1, False)))
    assert find_misfit(shape, int4, EngineSplit(2, 1, True)) is None
