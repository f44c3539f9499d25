"""Compares the bytes of an engine's weights in the scheme of a quantised checkpoint with numbers by hand."""

from __future__ import annotations

import dataclasses

import pytest
from architectures import ARCHITECTURES
from memory_cases import config

from slime.plan.card_phases import engine_weights
from slime.plan.model_shape import Shape
from slime.plan.scheme_bytes import QuantizedParams, count_quantized

QWEN3_30B = {"model_type": "qwen3_moe", **ARCHITECTURES["qwen3-30b-a3b"].config_fields()}
ATTENTION = 48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128)
EXPERTS = 48 * 128 * 3 * 2048 * 768
PLAIN = 2 * 151936 * 2048 + 48 * 128 * 2048
FP8 = 1 + 4 / 128**2
INT4 = 0.5 + 2 / 32


def fp8(**more: object) -> dict[str, object]:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], **more}}


def int4(*ignored: str) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    kind = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return {"quantization_config": {**kind, "ignore": list(ignored)}}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, None),
        (fp8(), QuantizedParams(ATTENTION, EXPERTS, FP8)),
        (
            fp8(modules_to_not_convert=[f"model.layers.{i}.self_attn" for i in range(48)]),
            QuantizedParams(0, EXPERTS, FP8),
        ),
        (
            fp8(modules_to_not_convert=["model.layers.0.self_attn.q_proj", "model.layers.47.mlp"]),
            QuantizedParams(ATTENTION // 48 * 47, EXPERTS // 48 * 47, FP8),
        ),
        (int4("lm_head"), QuantizedParams(ATTENTION, EXPERTS, INT4)),
        (int4("lm_head", "re:.*self_attn.*"), QuantizedParams(0, EXPERTS, INT4)),
        (int4("re:.*experts.*"), QuantizedParams(ATTENTION, 0, INT4)),
    ],
)
def test_parameters_that_a_scheme_quantizes(said, found):
    assert count_quantized(Shape.of(QWEN3_30B | said)) == found


def test_an_engine_keeps_the_scheme_of_its_checkpoint():
    engine = config(actor_num_gpus_per_node=2, rollout_num_gpus_per_engine=2)
    plain = engine_weights(engine, Shape.of(QWEN3_30B))
    assert plain.bytes == (ATTENTION + EXPERTS + PLAIN) * 2 / 2
    blocks = engine_weights(engine, Shape.of(QWEN3_30B | fp8()))
    assert blocks.bytes == ((ATTENTION + EXPERTS) * FP8 + PLAIN * 2) / 2
    assert blocks.arithmetic == "(29.9 G x 1 B + 635 M x 2 B) / 2 GPUs"
    groups = engine_weights(engine, Shape.of(QWEN3_30B | int4("re:.*self_attn.*")))
    assert groups.bytes == (EXPERTS * INT4 + (ATTENTION + PLAIN) * 2) / 2
    assert groups.arithmetic == "(29 G x 0.5625 B + 1.54 G x 2 B) / 2 GPUs"


def test_replicas_share_the_experts_in_the_scheme():
    engine = config(actor_num_gpus_per_node=4, rollout_num_gpus_per_engine=4)
    facts = engine.engine.engine_facts
    engine = engine.with_values(engine_facts=dataclasses.replace(facts, data_parallel_size=4))
    found = engine_weights(engine, Shape.of(QWEN3_30B | fp8()))
    assert found.bytes == ATTENTION * FP8 + PLAIN * 2 + EXPERTS * FP8 / 4
