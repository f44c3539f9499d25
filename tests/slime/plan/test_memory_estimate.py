"""Compares the estimate of a trainer rank's memory with numbers by hand and with measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES
from memory_cases import FULL, QWEN3_4B, config

from slime.config.schema import Config
from slime.plan.layer_elements import layer_width
from slime.plan.memory_estimate import estimate
from slime.plan.model_shape import Shape
from slime.plan.units import GIB, count

GLM_AIR = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
OTHER = {
    "llama-3.1-8b": (8_029_995_008, 32 * 2 * 1024),
    "mistral-7b": (7_247_757_312, 32 * 2 * 1024),
    "glm-4-9b": (9_399_435_264, 40 * 2 * 256),
    "mimo-7b": (7_622_098_944, 36 * 2 * 1024),
    "minimax-m2": (228_688_920_576, 62 * 2 * 1024),
}
"""Model of scripts/architectures.py -> number of elements in its matrices, and in its cache per token."""
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PARAMS = 4_022_272_000
QWEN3_30B_A3B = QWEN3_4B | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def items(c: Config, hf: dict[str, Any] = QWEN3_4B) -> dict[str, float]:
    e = estimate(c, hf)
    return {item.name: item.bytes for item in (*e.kept, *e.work)}


def test_arithmetic_by_hand():
    found = items(config(use_kl_loss=True))
    layer = 2560 * (2 * 4096 + 2 * 1024) + 3 * 2560 * 9728
    assert Shape.of(QWEN3_4B).params == PARAMS == 36 * layer + 151936 * 2560
    assert Shape.of({**QWEN3_4B, "num_key_value_heads": None}).cache == 36 * 2 * 4096
    assert found["weights"] == found["reference"] == PARAMS * 2
    assert (found["gradients"], found["optimizer"]) == (PARAMS * 4, PARAMS * 12)
    assert (
        found["update buckets"] == 2 * 151936 * 2560 * 2
    )  # the embedding is larger than a bucket of 512 MiB
    inputs, one = 36 * 2560, 4 * 2560 + 4 * 4096 + 4 * 1024 + 3 * 9728
    back = 9216 * (2 * 9728 + 2 * 2560) + 2 * 2560 * 9728
    assert found["layers, backward"] == 2 * (9216 * (inputs + one) + back)
    assert found["head and loss"] == 2 * 9216 * inputs + 1536 * 2**20 + 2 * 9216 * 2560 * 2
    assert found["embedding gradient"] == 151936 * 2560 * 2
    state = PARAMS * (2 + 2 + 4 + 12) + found["update buckets"]
    assert estimate(config(use_kl_loss=True), QWEN3_4B).peak == state + found["head and loss"]


def test_the_measured_run():
    run = json.loads((RESULTS / "colocated_qwen3_4b_h200.json").read_text())
    measured = max(step["perf/trainer_peak_gib"] for step in run["steps"])
    c = config(overrides={}, max_tokens_per_gpu=16384, rollout_max_response_len=256)
    assert estimate(c, QWEN3_4B).peak / GIB == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize(
    ("row", "flags", "error"),
    [(0, {"overrides": {}}, 0.02), (1, {}, 0.02)],  # without and with full recomputation
)
def test_training_alone_as_measured(row: int, flags: dict[str, Any], error: float):
    """Micro-batches have 16,384 tokens. The fused Adam is newer than the records, so the optimizer step's peak is
    left out."""
    measured = json.loads((RESULTS / "training_qwen3_4b_h200.json").read_text())["rows"][row]["medians"]
    c = config(colocate=False, rollout_num_gpus=0, debug_train_only=True, max_tokens_per_gpu=16384, **flags)
    parts = ("forward", "backward", "policy_loss")
    peak = max(measured[f"perf/{part}_peak_gib"] for part in parts)
    assert estimate(c, QWEN3_4B).peak / GIB == pytest.approx(peak, rel=error)


def test_widths_of_a_layer():
    """A layer keeps less per token than its inputs and outputs, unless a setting keeps all inputs and outputs."""
    attention = 4 * 4096 + 4 * 1024

    def width(**flags: Any) -> float:
        (item,) = (
            i for i in estimate(config(overrides={}, **flags), QWEN3_4B).work if i.name == "layers, backward"
        )
        back = 9216 * (2 * 9728 + 2 * 2560) + 2 * 2560 * 9728
        return (item.bytes / 2 - back) / 9216 / 36

    assert width() == 2 * 2560 + attention + 2 * 9728
    assert width(rlk_fast="off") == width(rl_kernel_ops=["logp"]) == 2 * 2560 + attention + 3 * 9728


def test_context_parallel_ranks_by_hand():
    """Exchanged heads: a copy of values and output, and on 16 ranks each of the 8 key heads twice. Gathered: the keys
    and values of the sequence, and of half a rank's share."""
    plain = layer_width(config(overrides={}), Shape.of(QWEN3_4B), Shape.of(QWEN3_4B).kinds[0])

    def added(cp: int, **flags: Any) -> float:
        layout = {"actor_num_gpus_per_node": cp, "context_parallel_size": cp, "overrides": {}}
        return layer_width(config(**layout, **flags), Shape.of(QWEN3_4B), Shape.of(QWEN3_4B).kinds[0]) - plain

    assert added(2) == added(8) == added(2, cp_comm_type="a2a") == 4096 + 1024
    assert added(16) == 4096 + 1024 + 2 * 1024
    assert added(2, cp_comm_type="all_gather") == 2.5 * 2 * 1024
    assert added(3) == 3.5 * 2 * 1024


def test_the_copies_of_the_fused_backend():
    """A layer keeps the padded output, 4096 elements, and up to 12.5% padding of queries, keys, values and output."""

    def added(shape: dict[str, Any] = QWEN3_4B, **flags: Any) -> float:
        widths = [
            layer_width(config(overrides=given, **flags), Shape.of(shape), Shape.of(shape).kinds[0])
            for given in ({}, {"attention_backend": "fused"})
        ]
        return widths[1] - widths[0]

    assert added() == 4096 + (4096 + 1024) * 2 / 8
    assert added(actor_num_gpus_per_node=2, tensor_model_parallel_size=2) == added() / 2
    assert added(QWEN3_4B | {"head_dim": 256}) == added(device="cpu") == 0


def test_inputs_of_layers_on_the_host():
    """The device keeps the input that the backward has fetched. A pinned input is a power of two of bytes."""
    found = estimate(config(max_tokens_per_gpu=65536, cpu_offloading=True), QWEN3_4B)
    before = estimate(config(max_tokens_per_gpu=65536), QWEN3_4B)
    inputs = 65536 * 2560 * 2
    back, same = (next(i for i in e.work if i.name == "layers, backward") for e in (found, before))
    assert same.bytes - back.bytes == 35 * inputs
    (item,) = found.host
    assert (item.name, item.bytes) == ("inputs of layers", 37 * 2**29) and inputs < 2**29


def test_the_longest_sample_counts():
    """A response of 8,192 tokens is alone in its micro-batch, which is shared by context-parallel ranks."""
    small = items(config(max_tokens_per_gpu=1024))
    assert small == items(config(max_tokens_per_gpu=8192)) != items(config(max_tokens_per_gpu=9216))
    layout = {"actor_num_gpus_per_node": 2, "context_parallel_size": 2}
    assert items(config(max_tokens_per_gpu=1024, **layout)) == items(
        config(max_tokens_per_gpu=4096, **layout)
    )


def test_experts_by_hand():
    """Qwen3-30B-A3B on eight GPUs with the flags of slime's script. A rank has 16 whole experts per layer, a quarter
    of the other weights, and whole routers. Sequence parallelism leaves it a quarter of a token's 8 copies."""
    layout = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "actor_num_gpus_per_node": 8}
    shared = layout | {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    shape, found = Shape.of(QWEN3_30B_A3B), items(config(**shared), QWEN3_30B_A3B)
    attention, expert = 48 * 2048 * (2 * 4096 + 2 * 512), 3 * 2048 * 768
    rest, routers = attention + 2 * 151936 * 2048, 48 * 2048 * 128
    assert (
        shape.params
        == rest + routers + 48 * 128 * expert
        == 30_532_122_624 - 48 * (2 * 2048 + 2 * 128) - 2048
    )
    assert shape.active == attention + routers + 48 * 8 * expert
    assert found["weights"] == (rest / 4 + routers) * 2 and found["expert weights"] == 48 * 16 * expert * 2
    assert found["optimizer"] == (rest / 4 + routers) * 12 / 2  # two data-parallel ranks
    assert found["expert optimizer"] == 48 * 16 * expert * 12  # no other rank has these experts
    one = 4 * 2048 / 4 + (4 * 4096 + 4 * 512) / 4 + 2 * (2048 + 4 * 768)
    back = 2 * (4 * 768 + 2 * 2048) + 2 * 2048 / 4
    assert found["layers, backward"] == 2 * 9216 * (48 * 2048 / 4 + one + back)
    alone = items(
        config(), QWEN3_30B_A3B
    )  # one rank has all experts, whose stacked weights are larger than a product's copies
    one = 4 * 2048 + 4 * 4096 + 4 * 512 + 8 * (2048 + 4 * 768)
    back = 9216 * (8 * (2 * 768 + 2048) + 2 * 2048) + 128 * 2 * 768 * 2048
    assert alone["layers, backward"] == 2 * (9216 * (48 * 2048 + one) + back)
    plain = items(config(**layout), QWEN3_30B_A3B)  # each expert is split like the other weights
    assert plain["expert weights"] == 48 * 128 * expert / 4 * 2
    assert plain["expert optimizer"] == 48 * 128 * expert / 4 * 12 / 2
    kept = items(config(overrides={}), QWEN3_30B_A3B)["head and loss"]
    width = 3 * 2048 + 4 * 4096 + 4 * 512 + 8 * (2048 + 4 * 768)
    assert kept == 2 * 9216 * 48 * width + 1536 * 2**20 + 2 * 9216 * 2048 * 2


def test_experts_without_operators_as_measured():
    """6 layers of a Qwen3-30B-A3B on an H200 with micro-batches of 8,192 tokens and --rlk-fast off took 92.01 GiB in
    the forward and 81.14 in the backward. Both imply that 94.6% of the tokens were responses. Per logit of a
    response, the entropy takes 16 B in the forward, and the gradient takes 6 B in the backward, in float32 and in
    bfloat16."""
    six = QWEN3_30B_A3B | {"num_hidden_layers": 6}
    e = estimate(config(max_tokens_per_gpu=8192, rlk_fast="off"), six)
    held = sum(item.bytes for item in e.kept) + 6 * 8192 * 2048 * 2
    logits = 0.946 * 8192 * 151936
    assert (held + 16 * logits) / GIB == pytest.approx(92.01, abs=0.02)
    assert (held + 6 * logits) / GIB == pytest.approx(81.14, abs=0.15)
    assert e.peak / GIB == pytest.approx(92.01, rel=0.015)
    assert estimate(config(max_tokens_per_gpu=8192), six).peak / GIB == pytest.approx(76.54, rel=0.005)


def test_stages_by_hand():
    """With full recomputation, the first rank of an interleaved pipeline has layer inputs of 5/2 micro-batches. If
    the first rank has no layers, the last rank has those of one micro-batch."""
    pair = {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2}
    full = {"overrides": {"recompute_granularity": "full"}}

    def layers(**flags: Any) -> float:
        item = next(i for i in estimate(config(**pair, **full, **flags), QWEN3_4B).work if "layers" in i.name)
        return float(item.arithmetic.partition(" x 2 B x ")[2].split()[0])

    assert layers() == 2 * 18
    assert layers(num_virtual_stages_per_pipeline_rank=2) == 5 / 2 * 18
    assert layers(pipeline_model_parallel_layout="E|t*36,L") == 36
    split = estimate(config(**pair, pipeline_model_parallel_layout="Et*30|t*6,L"), QWEN3_4B)
    per_layer = 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728)
    assert split.sum_part("gradients") == 4 * (30 * per_layer + 151936 * 2560)


def test_replayed_experts_by_hand():
    """An id takes two bytes. Each micro-batch in flight has every layer's ids in addition to its activations;
    between steps no ids are kept."""
    stages = {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2}
    for flags, flight in ({}, 1), (stages, 2):
        plain, replayed = (
            estimate(config(use_rollout_routing_replay=replay, **flags), QWEN3_30B_A3B)
            for replay in (False, True)
        )
        ids = 9216 * 48 * 8 * 2 * flight
        for name in ("layers, backward", "head and loss"):
            before, after = (next(item for item in e.work if item.name == name) for e in (plain, replayed))
            assert after.bytes == before.bytes + ids
            assert "experts' ids" in after.arithmetic and "experts' ids" not in before.arithmetic
        assert replayed.kept == plain.kept


def test_a_shared_expert_by_hand():
    """GLM-4.5-Air has a dense layer, then 45 layers with a shared expert, which tensor parallelism splits like an
    MLP."""
    shape = Shape.of(GLM_AIR)
    attention, expert, dense = 4096 * 128 * (2 * 96 + 2 * 8), 3 * 4096 * 1408, 3 * 4096 * 10944
    sparse = attention + 4096 * 128 + 129 * expert
    assert shape.params == 46 * attention + dense + 45 * (sparse - attention) + 2 * 151552 * 4096
    biases_and_norms = 46 * (112 * 128 + 2 * 4096) + 4096 + 45 * 128
    assert shape.params == 106_852_251_264 - biases_and_norms
    assert shape.active == 46 * attention + dense + 45 * (4096 * 128 + 9 * expert)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "actor_num_gpus_per_node": 8}
    found = items(config(**layout), GLM_AIR)
    rest = 46 * attention + dense + 45 * expert + 2 * 151552 * 4096
    assert found["weights"] == (rest / 2 + 45 * 4096 * 128) * 2
    assert found["expert weights"] == 45 * 128 * expert / 2 * 2
    kept = items(config(overrides={}), GLM_AIR)["head and loss"]
    heads = 4 * 96 * 128 + 4 * 8 * 128
    one = 3 * 4096 + heads + 2 * 1408 + 8 * (4096 + 4 * 1408)
    first = 2 * 4096 + heads + 2 * 10944
    assert kept == pytest.approx(2 * 9216 * (45 * one + first) + 1536 * 2**20 + 2 * 9216 * 4096 * 2)


def test_splits():
    tp = items(config(actor_num_gpus_per_node=2, tensor_model_parallel_size=2, sequence_parallel=True))
    one = 4 * 2560 / 2 + (4 * 4096 + 4 * 1024 + 3 * 9728) / 2
    back = 9216 * (2 * 9728 + 2 * 2560) / 2 + 2 * 2560 * 9728 / 2
    assert tp["layers, backward"] == 2 * (9216 * (36 * 2560 / 2 + one) + back)
    assert tp["weights"] == PARAMS and tp["optimizer"] == PARAMS * 6
    stages = items(config(actor_num_gpus_per_node=4, pipeline_model_parallel_size=2, context_parallel_size=2))
    # One stage has the embedding, the other its copy.
    stage = 18 * Shape.of(QWEN3_4B).layer().total + 151936 * 2560
    assert stages["weights"] == stage * 2
    assert stages["optimizer"] == stage * 12 / 2  # the context-parallel ranks also share it
    # A rank has keys and values of the whole row, twice its own part, and once more of a quarter: 2.5 times 2 x 1024
    # per token.
    one = 4 * 2560 + 4 * 4096 + 4 * 1024 + 2.5 * 2 * 1024 + 3 * 9728
    assert stages["layers, backward"] == 2 * (
        9216 * (18 * 2 * 2560 + one) + 9216 * (2 * 9728 + 2 * 2560) + 2 * 2560 * 9728
    )  # two micro-batches are in flight


def test_other_heads_and_precisions():
    kept = 2 * 9216 * 36 * 2560
    columns = 9216 * 151936
    # Per logit: its float32 value, and for the entropy its difference to the maximum, the exp and their product.
    assert items(config(rlk_fast="off"))["head and loss"] == kept + columns * 16
    # In the backward: the entropy's softmax, log-probs, two temporaries and gradient, and the cross entropy's
    # gradient.
    assert items(config(rlk_fast="off", entropy_coef=0.1))["head and loss"] == kept + columns * 24
    # In addition to the 16 bytes: the logits before the division.
    assert items(config(rlk_fast="off", rollout_temperature=0.7))["head and loss"] == kept + columns * 20
    assert items(config(rl_kernel_ops=["logp"]))["head and loss"] == kept + columns * 4
    plain = items(config(overrides={"grad_reduce_in_fp32": False}))
    assert plain["gradients"] == PARAMS * 2 and plain["optimizer step"] == PARAMS * 4
    assert items(config(fp32=True))["optimizer"] == PARAMS * 8
    no_engine = items(config(debug_train_only=True))
    assert "update buckets" not in no_engine
    open_ended = config(use_dynamic_batch_size=False, rollout_max_response_len=None)
    assert "layers, backward" not in items(open_ended)


def test_peak_is_reported_against_the_estimate():
    e = estimate(config(), QWEN3_4B)
    compared = e.compared({"perf/trainer_peak_gib": 2 * e.peak / GIB})
    assert compared == {"perf/memory/estimate_gib": e.peak / GIB, "perf/memory/peak_of_estimate": 2.0}
    assert e.compared({"perf/trainer_time": 1.0}) == {}  # a CPU has no measured peak


def test_units():
    assert [count(n) for n in (12, 1234, 4_022_272_000)] == ["12", "1.23 k", "4.02 G"]


def test_shapes_of_other_families():
    """The test covers matrices, the elements that one token uses, and the engine's cache per token. GLM-4 keeps the
    inputs of two more norms."""
    fields = {
        name: ARCHITECTURES[name].config_fields() | {"model_type": ARCHITECTURES[name].family}
        for name in OTHER
    }
    shapes = {name: Shape.of(hf) for name, hf in fields.items()}
    assert {name: (shape.params, shape.cache) for name, shape in shapes.items()} == OTHER
    assert f"{shapes['minimax-m2'].active / 1e9:.1f}" == "9.8"  # the card has 10, with the head
    glm = shapes["glm-4-9b"]
    plain, more = (
        layer_width(config(), replace(glm, post_norms=post), glm.kinds[0]) for post in (False, True)
    )
    assert more - plain == 2 * 4096


def test_an_optimizer_on_the_host_by_hand():
    """The device loses 12 bytes per parameter. The host gets these bytes, and buffers for arriving gradients."""
    plain, host = config(), config(optimizer_cpu_offload=True)
    assert items(host) == items(plain) | {"optimizer": 0}
    assert estimate(plain, QWEN3_4B).host == ()
    on_host, buffers = estimate(host, QWEN3_4B).host
    assert (on_host.bytes, on_host.arithmetic) == (PARAMS * 12, "4.02 G x 12 B / TP 1 / 1 shards")
    embedding = 4 * 151_936 * 2560
    assert (buffers.bytes, buffers.arithmetic) == (3 * embedding, "3 buffers of 1.45 GiB, pinned")
    quarter = estimate(config(optimizer_cpu_offload=True, optimizer_offload_fraction=0.25), QWEN3_4B)
    assert quarter.sum_part("optimizer") == PARAMS * 12 * 0.75
    assert [item.bytes for item in quarter.host] == [PARAMS * 12 * 0.25, 3 * embedding]
    bf16 = {"overrides": FULL | {"grad_reduce_in_fp32": False}}
    assert items(config(**bf16))["optimizer step"] == PARAMS * 4
    assert "optimizer step" not in items(config(**bf16, optimizer_cpu_offload=True))
    layout = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "actor_num_gpus_per_node": 8}
    sparse = estimate(config(**layout, optimizer_cpu_offload=True), QWEN3_30B_A3B)
    assert [item.name for item in sparse.host] == ["optimizer", "expert optimizer", "gradients of Adam"]


def test_operands_in_fp8_by_hand():
    """The gradient of gate and up is rounded twice, their input once, and their weight once. The weights of the layers
    are kept in two forms of one byte, also in the head and the loss."""
    blocks = {"overrides": {**FULL, "fp8": "e4m3", "fp8_recipe": "blockwise"}}
    plain, found = items(config()), items(config(**blocks))
    kept = 2 * (PARAMS - 151_936 * 2560)
    kept += (
        (1 + 4 / 128) * 9216 * (2 * 2560 + 4096 + 1024 + 9728)
    )  # inputs of the layer that is computed again
    back = found.pop("layers, backward") - plain.pop("layers, backward")
    assert back == pytest.approx((1 + 4 / 128) * (9216 * (2 * 2 * 9728 + 2560) + 2 * 9728 * 2560) + kept)
    assert found.pop("head and loss") - plain.pop("head and loss") == 2 * (PARAMS - 151_936 * 2560)
    assert found == plain
    back = (
        items(config(**blocks), QWEN3_30B_A3B)["layers, backward"]
        - items(config(), QWEN3_30B_A3B)["layers, backward"]
    )
    rows = 9216 * 8 + 128 * 128  # each of the 128 experts has a last block of 128 rows
    operands = (1 + 4 / 128) * (rows * (2 * 2 * 768 + 2048) + 128 * 2 * 768 * 2048)
    operands += (1 + 4 / 128) * 9216 * (2048 + 4096 + 512)
    assert back == pytest.approx(operands + 2 * (30_532_122_624 - 2 * 151_936 * 2048), rel=1e-4)
    deepgemm = items(config(**blocks, rlk_fp8_products="deepgemm"), QWEN3_30B_A3B)["layers, backward"]
    assert deepgemm - items(config(**blocks), QWEN3_30B_A3B)["layers, backward"] == 2 * rows * 2048
