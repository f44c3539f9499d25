"""Tests the parts of the state that leave the device on GPUs of several sizes, and the lines that report it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from memory_cases import FULL, QWEN3_4B, config

from slime.plan.card_phases import BESIDES_GENERATING, BESIDES_TRAINER, FRAGMENTATION, FURTHER_ENGINE
from slime.plan.fit import MachineSizes, fit
from slime.plan.memory_decision import choices, decide_residence
from slime.plan.memory_estimate import estimate
from slime.plan.units import GIB
from vime.vllm.backend import engine_facts


def decided(device_gib: float | None, **flags: Any) -> tuple[tuple[str, ...], str]:
    c = config(**flags)
    size = None if device_gib is None else device_gib * GIB
    decision = decide_residence(c, estimate(c, QWEN3_4B), size)
    return decision.leaving, "\n".join(decision.lines)


@pytest.mark.parametrize(
    ("device_gib", "leaving"),
    [
        (200, ()),
        (129, ()),  # (68.88 + 7.5) / 0.6 = 127.3
        (126, ("gradients",)),  # this costs nothing, because their contents are not needed
        (101, ("gradients", "parameters")),  # 7.5 GiB each way; the optimizer would be 45 GiB
        (89, ("gradients", "optimizer")),
        (26, ("gradients", "parameters", "optimizer")),
        (10, ("gradients", "parameters", "optimizer")),
    ],
)
def test_as_little_travels_as_memory_asks_for(device_gib, leaving):
    assert decided(device_gib)[0] == leaving


def test_the_smallest_gpu_of_each_choice_is_where_its_sum_comes_out_even():
    e = estimate(config(), QWEN3_4B)
    sets = choices(e, ("gradients", "parameters", "optimizer"))
    assert [e.left(s) for s in sets] == sorted((e.left(s) for s in sets), reverse=True)
    for before, leaving in itertools.pairwise(sets):
        least = (e.left(before) + BESIDES_GENERATING) / 0.6 / GIB
        assert decided(least + 1e-6)[0] == before
        assert decided(least - 1e-3)[0] == leaving


def test_a_plan_has_the_bytes_that_move():
    """Gradients are freed, and do not move."""
    e = estimate(config(), QWEN3_4B)
    every = e.sum_part("parameters") + e.sum_part("optimizer")
    for offload, moved in ((True, every), (False, 0.0)):
        found = fit(config(offload_train=offload), QWEN3_4B, MachineSizes(139.8 * GIB))
        assert found.moved == moved
    assert e.sum_part("gradients") > 0 and e.sum_moved(["gradients", "parameters"]) == e.sum_part(
        "parameters"
    )


def test_flags_decide_first():
    everything = ("gradients", "parameters", "optimizer")
    assert decided(1000, offload_train=True)[0] == everything
    assert decided(1000, offload=True)[0] == everything
    leaving, text = decided(40, offload_train=False)
    assert leaving == () and "the trainer's state stays on the device (--no-offload-train)" in text
    assert decided(None, offload_train=False) == ((), "")
    assert decided(1000, offload_train=True, offload_train_parts=["optimizer"])[0] == ("optimizer",)
    assert decided(26, offload_train_parts=["optimizer"])[0] == ("optimizer",)
    assert decided(26, colocate=False, rollout_num_gpus=1)[0] == ()
    leaving, text = decided(26, overrides=FULL | {"nccl_ub": True})
    assert leaving == () and "stays on the device (--nccl-ub)" in text
    assert "--offload-train" not in text  # they could not leave
    assert decided(None, device="cpu") == decided(80, device="cpu") == ((), "")
    leaving, text = decided(None, device="cpu", offload_train=True)
    assert leaving == everything and "GPU" not in text


def test_lines_say_what_leaves_and_what_is_short():
    _, text = decided(140.4)
    assert "the trainer's state stays on the device (to save memory)" in text
    assert "while engines generate 132.54 GiB of 140.40 GiB: 68.88 GiB of the trainer, 0.4 of the GPU" in text
    assert (
        "while it trains 76.97 GiB of 140.40 GiB: 72.05 GiB of tensors, a sleeping engine's and its own 4.70 GiB "
        "besides, 227.22 MiB of gaps" in text
    )
    assert text.endswith("\nfits a GPU of 140.4 GiB") and "too much" not in text
    _, text = decided(60)
    assert "gradients, optimizer leave the device, 44.95 GiB to the host and back a step" in text
    assert text.endswith(
        "\ndoes not fit a GPU of 60 GiB: 10.38 GiB too much while it loads; 16.97 GiB too much while it trains"
    )
    _, text = decided(None)
    assert "  from 127.30 GiB on: nothing\n" in text and "  and training needs 76.97 GiB" in text


@pytest.mark.parametrize(
    ("apart", "besides"),
    [({"colocate": False, "rollout_num_gpus": 1}, 4.0), ({"debug_train_only": True}, 2.8)],
    ids=["disaggregated", "alone"],
)
def test_a_trainer_with_a_gpu_of_its_own_gets_a_verdict(apart, besides):
    """The GPU has the trainer's tensors, 2.8 GiB and the communicators with engines; no engine sleeps on it."""
    e = estimate(config(**apart), QWEN3_4B)
    needed = (e.peak + FRAGMENTATION * max(item.bytes for item in e.work)) / GIB + besides
    leaving, text = decided(needed + 0.01, **apart)
    assert leaving == () and text.endswith(f"\nfits a GPU of {needed + 0.01:.4g} GiB")
    assert f"while it trains {needed:.2f} GiB of" in text and "engine" not in text
    _, text = decided(needed - 1, **apart)
    assert text.endswith(f"does not fit a GPU of {needed - 1:.4g} GiB: 1.00 GiB too much while it trains")
    assert decided(None, **apart) == ((), "")


def test_state_that_must_stay_counts_while_engines_generate():
    """68.88 + 0.4 x 100 + 7.5 = 116.38 does not fit, although training does."""
    _, text = decided(100, offload_train=False)
    assert text.endswith("\ndoes not fit a GPU of 100 GiB: 16.38 GiB too much while engines generate")


KV = 16 * GIB


def given_kv(share: float) -> dict[str, Any]:
    return {"engine_facts": engine_facts({"gpu_memory_utilization": share, "kv_cache_memory_bytes": KV})}


def test_kv_cache_in_bytes_is_what_an_engine_takes_whatever_its_share():
    """68.88 of state, 7.49 + 16 of the engine and 7.5 elsewhere are 99.87. A share of 0.2 must be free at its
    start."""
    leaving, text = decided(100, **given_kv(0.2))
    assert leaving == () and text.endswith("\nfits a GPU of 100 GiB")
    assert (
        "while engines generate 99.87 GiB of 100.00 GiB: 68.88 GiB of the trainer, 7.49 GiB of weights and 16.00 GiB "
        "of KV cache for the engine, 7.50 GiB besides" in text
    )
    assert decided(99.8, **given_kv(0.2))[0] == ("gradients",)
    two = config(rollout_num_gpus_per_engine=2, actor_num_gpus_per_node=2, **given_kv(0.2))
    lines = decide_residence(two, estimate(two, QWEN3_4B), 100 * GIB).lines
    assert any("3.75 GiB of weights" in line for line in lines)


def test_the_share_must_be_free_when_an_engine_starts_even_where_its_kv_cache_is_given():
    """vLLM does not start if its share is not free: 68.88 + 1.5 + 0.4 x 116 = 116.78."""
    assert decided(116, **given_kv(0.4))[0] == ("gradients",)
    _, text = decided(116, **given_kv(0.4), offload_train=False)
    assert (
        "when an engine starts 116.78 GiB of 116.00 GiB: 70.38 GiB of the trainer, 0.4 of the GPU that vLLM wants to "
        "find free" in text
    )
    assert "MiB too much when an engine starts" in text


@pytest.mark.parametrize("share", [0.1, 0.4, 0.92])
def test_the_sizes_told_without_a_gpu_are_those_that_decide_on_one(share):
    e, weights = estimate(config(**given_kv(share)), QWEN3_4B), 4_022_272_000 * 2
    told = decided(None, **given_kv(share))[1].splitlines()[1:]
    sets = choices(e, ("gradients", "parameters", "optimizer"))
    for before, leaving, line in zip([None, *sets], sets, told, strict=False):
        least = max(
            e.left(leaving) + weights + KV + BESIDES_GENERATING,
            (e.left(leaving) + BESIDES_TRAINER) / (1 - share),
        )
        assert line == f"  from {least / GIB:.2f} GiB on: {', '.join(leaving) or 'nothing'}"
        assert decided(least / GIB + 1e-6, **given_kv(share))[0] == leaving
        assert before is None or decided(least / GIB + 1e-6, **given_kv(share))[0] != before


@pytest.mark.parametrize("share", [0.1, 0.92])
def test_several_engines_of_a_gpu_add_their_weights_caches_and_contexts(share):
    """Three engines generate at once. The last to start finds the others on the GPU, and needs a third of the share."""
    flags = given_kv(share) | {"rollout_engines_per_gpu": 3}
    e, each = estimate(config(**flags), QWEN3_4B), 4_022_272_000 * 2 + KV
    generating = e.left(()) + 3 * each + 2 * FURTHER_ENGINE + BESIDES_GENERATING
    starting = e.left(()) + 2 * (each + FURTHER_ENGINE) + BESIDES_TRAINER
    least = max(generating, starting / (1 - share / 3)) / GIB
    leaving, text = decided(least + 1e-6, **flags)
    assert leaving == () and f"while engines generate {generating / GIB:.2f} GiB of" in text
    assert decided(least - 1e-3, **flags)[0] == ("gradients",)
    assert f"  from {least:.2f} GiB on: nothing" in decided(None, **flags)[1]


def test_the_head_of_the_same_bits_works_in_pieces():
    """Its logits never exist for all tokens: 117 rollouts of a 0.5B had the peak of the default head
    (qwen2_5_0_5b_gsm8k_sides_h200)."""
    plain, same = (estimate(config(rlk_bitwise=flag), QWEN3_4B).peak for flag in (False, True))
    assert same == plain
