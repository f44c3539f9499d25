"""Compares the plan with the memory of real runs: cards by nvidia-smi, hosts by the resident sets of their processes.

Each case is a run in benchmarks/results or a run on four H200 with 503 GiB on their host (Qwen3-30B-A3B, whole).
"""

from __future__ import annotations

from typing import Any

import pytest
from architectures import ARCHITECTURES
from memory_cases import QWEN3_4B, config

from slime.plan.advice import advice_lines, advise, gradient_sums, savings
from slime.plan.communicators import CHANNELS_OF_COLLECTIVES, OWN, Communicator, trainer_communicators
from slime.plan.fit import MachineSizes, fit, shortage
from slime.plan.host_phases import USABLE
from slime.plan.units import GIB
from slime.tracking.phases import FIRST_WEIGHTS, GENERATING, HAND_OVER, LOADING, PHASES, SAVING, TRAINING
from vime.vllm.backend import engine_facts

QWEN3_8B = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-8b"].config_fields()}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    **ARCHITECTURES["qwen3-30b-a3b"].config_fields(),
}
H200, H100 = 139.8 * GIB, 79.18 * GIB
HOST = 503 * GIB
FOUR: dict[str, Any] = {
    "actor_num_gpus_per_node": 4,
    "num_gpus_per_node": 4,
    "rollout_num_gpus_per_engine": 2,
    "tensor_model_parallel_size": 4,
    "sequence_parallel": True,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "max_tokens_per_gpu": 20480,
    "rollout_max_response_len": 512,
    "engine_facts": engine_facts({"gpu_memory_utilization": 0.5}),
}
ADAPTERS: dict[str, Any] = {
    "lora_rank": 32,
    "lora_alpha": 32,
    "max_tokens_per_gpu": 4096,
    "rl_kernel_workspace_mib": 512,
}
RAN: dict[str, Any] = {
    **FOUR,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.3,
    "max_tokens_per_gpu": 8192,
    "rl_kernel_workspace_mib": 512,
    "engine_facts": engine_facts({"gpu_memory_utilization": 0.3}),
}
RAN_ON_H100: dict[str, Any] = {
    **FOUR,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.9,
    "max_tokens_per_gpu": 16384,
    "rollout_max_response_len": 256,
    "engine_facts": engine_facts({"gpu_memory_utilization": 0.45}),
}


@pytest.mark.parametrize(
    ("hf", "flags", "card", "measured_gib"),
    [
        pytest.param(
            QWEN3_4B,
            {
                "max_tokens_per_gpu": 16384,
                "overrides": {},
                "engine_facts": engine_facts(
                    {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 16 * GIB}
                ),
            },
            H200,
            131_135 / 1024,
            id="colocated_qwen3_4b_h200",
        ),
        pytest.param(
            QWEN3_4B,
            {**ADAPTERS, "engine_facts": engine_facts({"gpu_memory_utilization": 0.081})},
            H200,
            28_036 / 1024,
            id="features_h200, adapters_4b",
        ),
        pytest.param(
            QWEN3_8B,
            {**ADAPTERS, "engine_facts": engine_facts({"gpu_memory_utilization": 0.5})},
            H200,
            95_116 / 1024,
            id="features_h200, adapters_8b",
        ),
        pytest.param(
            QWEN3_4B,
            {
                "max_tokens_per_gpu": 16896,
                "rl_kernel_workspace_mib": 512,
                "rollout_max_response_len": 512,
                "offload_train": True,
                "offload_train_parts": ["gradients", "parameters"],
                "engine_facts": engine_facts({"gpu_memory_utilization": 24 / 139.8}),
            },
            H200,
            80.48,
            id="allocator_h200, 4B",
        ),
        pytest.param(QWEN3_30B, RAN, H200, 131.0, id="four H200, 30B"),
        pytest.param(QWEN3_30B, RAN_ON_H100, H100, 78_921 / 1024, id="whole_qwen3_30b_h100"),
    ],
)
def test_the_fullest_phase_of_a_card_is_within_5_percent(hf, flags, card, measured_gib):
    (phases,) = fit(config(**flags), hf, MachineSizes(card)).cards.values()
    assert max(phases.values()) / GIB == pytest.approx(measured_gib, rel=0.05)
    assert fit(config(**flags), hf, MachineSizes(card)).over <= 0


def test_phases_of_a_card_with_adam_on_the_host_are_within_5_percent():
    """The record is host_adam_qwen3_4b_h200. While the trainer loads, the weights are on the card twice."""
    flags = {
        "offload_train": True,
        "optimizer_cpu_offload": True,
        "max_tokens_per_gpu": 8192,
        "rl_kernel_workspace_mib": 512,
        "engine_facts": engine_facts({"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 * GIB}),
    }
    (phases,) = fit(config(**flags), QWEN3_4B, MachineSizes(H200)).cards.values()
    for phase, measured_gib in ((LOADING, 33.01), (GENERATING, 24.10), (TRAINING, 32.90)):
        assert phases[phase] / GIB == pytest.approx(measured_gib, rel=0.05), phase
    (plain,) = fit(
        config(**flags, use_distributed_optimizer=False), QWEN3_4B, MachineSizes(H200)
    ).cards.values()
    assert plain[LOADING] < phases[LOADING] - 0.5 * GIB


WHOLE: dict[str, Any] = {
    "offload_train": True,
    "max_tokens_per_gpu": 8192,
    "rl_kernel_workspace_mib": 512,
    "rollout_max_response_len": 256,
    "engine_facts": engine_facts({"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 * GIB}),
}


@pytest.mark.parametrize(
    ("arch", "kind", "flags", "measured_gib"),
    [
        (
            "glm-4-9b",
            "glm4",
            {
                "offload_train_parts": ["gradients", "parameters"],
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": 0.3,
            },
            (129.91, 105.77, 107.94, 116.69, 137.56),
        ),
        (
            "llama-3.1-8b",
            "llama",
            {"offload_train_parts": ["gradients"], "use_precision_aware_optimizer": True},
            (117.41, 119.22, 121.23, 121.23, 130.31),
        ),
    ],
)
def test_phases_of_whole_8b_and_9b_models_on_one_card_are_within_5_percent(arch, kind, flags, measured_gib):
    """The record is memory_9b_h200."""
    hf = {"model_type": kind, "hidden_act": "silu", **ARCHITECTURES[arch].config_fields()}
    (phases,) = fit(config(**WHOLE, **flags), hf, MachineSizes(H200)).cards.values()
    names = (LOADING, FIRST_WEIGHTS, GENERATING, HAND_OVER, TRAINING)
    for phase, measured in zip(names, measured_gib, strict=True):
        assert phases[phase] / GIB == pytest.approx(measured, rel=0.05), phase


@pytest.mark.parametrize(
    ("flags", "measured_gib"),
    [
        pytest.param({"offload_train": True}, 54.3, id="smoke_qwen3_4b_h100"),
        pytest.param(
            {"offload_train": True, "optimizer_cpu_offload": True},
            58.66,
            id="host_adam_qwen3_4b_h200",
        ),
    ],
)
def test_the_host_memory_of_a_trainer_is_within_5_percent(flags, measured_gib):
    host = fit(config(max_tokens_per_gpu=8192, **flags), QWEN3_4B, MachineSizes(H100)).host
    assert host is not None
    names = ("trainers", "Adam on the host", "offloaded state")
    own = sum(item.bytes for item in host.items if item.name in names)
    assert own / GIB == pytest.approx(measured_gib, rel=0.05)
    # In against_trl_h100, all processes of such a run had 57.95 GiB, and 3.65 GiB were outside the trainer.
    others = sum(
        item.bytes for item in host.items if item.name in ("engines", "driver, manager, router, Ray")
    )
    assert others / GIB == pytest.approx(57.95 - 54.3, rel=0.05)


def test_the_30b_on_four_h200_that_died_does_not_fit():
    """The first run ended with NCCL out of memory in its first step. Ray killed the second run, whose trainers had
    all gradients pinned (114.8 GiB each); without pinned gradients it fits."""
    first = fit(config(**FOUR), QWEN3_30B, MachineSizes(H200, HOST))
    assert [(need.of, need.phase) for need in first.short()] == [("a GPU", TRAINING)]
    assert "too much for a GPU of 139.8 GiB" in shortage(first.short()[0])
    second = fit(config(**FOUR, optimizer_cpu_offload=True), QWEN3_30B, MachineSizes(H200, HOST))
    assert not second.short()
    small = fit(config(**FOUR, optimizer_cpu_offload=True), QWEN3_30B, MachineSizes(H200, 380 * GIB))
    assert {need.of for need in small.short()} == {"a host"} and small.worst.phase == LOADING
    assert "380 GiB, of which a plan fills 93%" in shortage(small.worst)


def test_four_engines_of_a_gpu_while_they_generate():
    """rollout_engines_per_gpu_qwen2_5_0_5b_h200: 40.45 GiB. The reserve of 7.5 GiB for one engine was measured with a
    4B, and a 0.5B needs less."""
    hf = {"model_type": "qwen2", "hidden_act": "silu", **ARCHITECTURES["qwen2.5-0.5b"].config_fields()}
    facts = engine_facts({"kv_cache_memory_bytes": 4 * GIB, "gpu_memory_utilization": 0.5})
    flags = {"rollout_engines_per_gpu": 4, "engine_facts": facts, "update_weight_buffer_size": 512 * 2**20}
    (card,) = fit(config(**flags), hf, MachineSizes(H200)).cards.values()
    assert card[GENERATING] / GIB == pytest.approx(40.45, rel=0.08)
    host = {item.name: item.bytes for item in fit(config(**flags), hf, MachineSizes(H200, HOST)).host.items}
    one = {item.name: item.bytes for item in fit(config(), hf, MachineSizes(H200, HOST)).host.items}
    assert host["engines"] == 4 * one["engines"]


def test_fewer_engines_per_gpu_are_advised():
    """Eight engines and the trainer's state need 8 x (7.49 + 8) + 7 x 2.2 + 7.5 + 68.9 = 215.7 GiB. Three fit."""
    facts = engine_facts({"kv_cache_memory_bytes": 8 * GIB, "gpu_memory_utilization": 0.4})
    flags = {
        "offload_train": False,
        "rollout_engines_per_gpu": 8,
        "max_tokens_per_gpu": 4096,
        "engine_facts": facts,
    }
    best = advise(config(**flags), QWEN3_4B, MachineSizes(H200))[0]
    assert str(best) == "--rollout-engines-per-gpu 3 (now 8) gives 88.46 GiB, fits"


def test_advice_is_what_a_new_plan_gives():
    """The first flags make the run fit: remainders, and no smaller part of Adam on the host."""
    c, machine = config(**FOUR), MachineSizes(H200, HOST)
    remainders, best, *others = advise(c, QWEN3_30B, machine)
    assert remainders.change.flag == "--use-precision-aware-optimizer" and remainders.missing <= 0
    assert (
        best.change.flag == "--optimizer-cpu-offload --optimizer-offload-fraction 0.1" and best.missing <= 0
    )
    before, after = fit(c, QWEN3_30B, machine), fit(best.change.config, QWEN3_30B, machine)
    assert after.over <= 0 < before.over and len(others) == 1
    assert best.saved_bytes == pytest.approx(
        before.worst.bytes - max(n.bytes for n in after.needs if n.of == "a GPU" and n.phase == TRAINING)
    )
    _, line, *_ = advice_lines(c, QWEN3_30B, machine)
    assert line == ("--optimizer-cpu-offload --optimizer-offload-fraction 0.1 (now 0) gives 8.54 GiB, fits")
    full = config(**FOUR, optimizer_cpu_offload=True)
    (only,) = advise(full, QWEN3_30B, MachineSizes(H200, 380 * GIB))
    assert only.change.flag.endswith("--optimizer-offload-fraction 0.9") and only.change.now == "1"
    assert advise(config(**RAN), QWEN3_30B, machine) == []


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_sample_longer_than_a_micro_batch_needs_more_ranks(bitwise):
    """A sample of 131,072 tokens does not fit one rank of an H100, though --max-tokens-per-gpu would."""
    alone = {"debug_train_only": True, "colocate": False, "rollout_num_gpus": 0, "actor_num_gpus_per_node": 4}
    c = config(**alone, rollout_max_response_len=131072, max_tokens_per_gpu=32768, rlk_bitwise=bitwise)
    flags = [
        advice.change.flag
        for advice in advise(c, QWEN3_4B, MachineSizes(79.18 * GIB, HOST))
        if advice.missing <= 0
    ]
    assert "--context-parallel-size 2 --max-tokens-per-gpu 65536" in flags
    assert "--cpu-offloading" in flags


def test_flags_that_are_enough_together_say_so():
    """No single flag frees the 72 GiB of a step on a card of 66 GiB."""
    lines = advice_lines(config(max_tokens_per_gpu=65536), QWEN3_4B, MachineSizes(20 * GIB))
    *single, together = lines
    assert len(single) > 1 and all("are still missing" in line for line in single)
    assert together.startswith(f"all {len(single)} together leave ")


@pytest.mark.parametrize("overrides", [{}, {"grad_reduce_in_fp32": True}])
def test_sums_of_gradients_in_bfloat16_are_advised(overrides):
    """Recomputation and these sums are both overrides of Megatron's settings, and both count together, also if the user
    has set the default."""
    alone = {"debug_train_only": True, "colocate": False, "rollout_num_gpus": 0}
    host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.9}
    short = {"max_tokens_per_gpu": 2048, "rollout_max_response_len": 2048}
    c = config(**alone, **host, **short, use_precision_aware_optimizer=True, overrides=overrides)
    line, *_, together = advice_lines(c, QWEN3_4B, MachineSizes(24 * GIB, HOST))
    assert line == "--grad-reduce-in-bf16 (now off) gives 7.49 GiB, 5.78 GiB are still missing"
    assert together == "all 3 together fit"
    flags = [change.flag for change in gradient_sums(config())]
    assert flags == ["--grad-reduce-in-bf16", "--grad-reduce-in-bf16 --use-precision-aware-optimizer"]
    assert gradient_sums(config(fp32=True)) == []
    assert gradient_sums(config(overrides={"grad_reduce_in_fp32": False})) == []


def test_a_larger_share_is_advised_where_an_engine_is_what_does_not_fit():
    from vime.memory.lines import engine_needs

    small = config(engine_facts=engine_facts({"gpu_memory_utilization": 0.05}))
    machine = MachineSizes(H100)
    (best, *_) = advise(small, QWEN3_4B, machine, engine_needs(QWEN3_4B, machine))
    assert best.change.flag.startswith("--vllm-gpu-memory-utilization 0.") and best.missing <= 0
    assert best.change.config.engine.engine_facts.memory_share >= 0.1


def test_what_saves_on_a_full_card_is_computed_for_its_phase():
    found = savings(config(overrides={}, max_tokens_per_gpu=16384), QWEN3_4B, TRAINING, 5 * GIB)
    assert found and all(one.saved_bytes >= 5 * GIB for one in found if one.missing <= 0)
    assert any(one.change.flag.startswith("--max-tokens-per-gpu") for one in found)


def test_communicators_of_a_layout():
    """A connection's bytes are as measured: 10 MiB and two structures of 2 MiB."""
    names = {one.name: (one.ranks, one.use) for one in trainer_communicators(config(**FOUR))}
    assert names == {
        "all ranks": (4, "ring"),
        "gradient norm": (4, "tree"),
        "tensor parallel": (4, "tree"),
        "experts": (4, "exchange"),
        "experts' counts": (4, "ring"),
    }
    connection = 14 * 2**20
    assert Communicator("a", 2, "tree").bytes({}) == OWN + CHANNELS_OF_COLLECTIVES * connection
    assert Communicator("a", 8, "tree").bytes({}) == OWN + 2 * CHANNELS_OF_COLLECTIVES * connection
    # NVIDIA/nccl issue 1685: the first all-to-all of eight H100 took 3.28 GB.
    assert Communicator("a", 8, "exchange").bytes({}) - OWN == pytest.approx(3.28e9, rel=0.01)
    small = Communicator("a", 8, "tree").bytes({"NCCL_BUFFSIZE": 2**20, "NCCL_MAX_NCHANNELS": "4"})
    assert small == OWN + 2 * 4 * (8 + 4) * 2**20
    assert list(trainer_communicators(config())) == []
    apart = config(colocate=False, rollout_num_gpus=1)
    assert [(one.name, one.ranks) for one in trainer_communicators(apart)] == [("weights", 2)]


def test_a_checkpoint_in_flight_and_published_weights_are_on_the_host(tmp_path):
    plain = config(actor_num_gpus_per_node=4, num_gpus_per_node=4, save=str(tmp_path), save_interval=1)
    saves = fit(plain, QWEN3_4B, MachineSizes(H200))
    flying = fit(plain.with_values(async_save=True), QWEN3_4B, MachineSizes(H200))
    params = 4_022_272_000
    for phase, more in ((LOADING, 0), (SAVING, 14 * params), (TRAINING, 14 * params)):
        before, after = saves.host.sum_phase(phase), flying.host.sum_phase(phase)
        assert after - before == pytest.approx(more, abs=0.01 * 14 * params)
    (card,) = saves.cards.values()
    assert set(card) == set(PHASES) and card[SAVING] < card[TRAINING]
    assert card[FIRST_WEIGHTS] == card[GENERATING] == card[HAND_OVER]
    disk = fit(plain.with_values(update_weight_transport="disk"), QWEN3_4B, MachineSizes(H200))
    assert disk.host.sum_phase(TRAINING) - saves.host.sum_phase(TRAINING) == pytest.approx(
        3 * 2 * params, rel=0.01
    )


def test_a_container_counts_not_the_host():
    """A run that fits a host of 503 GiB does not fit a limit of 100 GiB."""
    flags = {"offload_train": True, "optimizer_cpu_offload": True, "max_tokens_per_gpu": 8192}
    small = fit(config(**flags), QWEN3_4B, MachineSizes(H100, 60 * GIB))
    assert small.over > 0 and small.worst.of == "a host" and small.worst.limit == USABLE * 60 * GIB
    assert fit(config(**flags), QWEN3_4B, MachineSizes(H100, HOST)).over <= 0
    assert fit(config(device="cpu", overrides={}), QWEN3_4B, MachineSizes(H100, GIB)).needs == ()
