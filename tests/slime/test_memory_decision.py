"""What leaves the device on GPUs of several sizes, and what is said of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from memory_cases import FULL, QWEN3_4B, config

from slime.memory_decision import BESIDES_GENERATING, choices, decide_residence, lowering
from slime.memory_estimate import GIB, estimate


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
        (126, ("gradients",)),  # free: nobody needs their contents
        (101, ("gradients", "parameters")),  # 7.5 GiB each way, where the optimizer would be 45
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


def test_flags_decide_first():
    everything = ("gradients", "parameters", "optimizer")
    assert decided(1000, offload_train=True)[0] == everything
    assert decided(1000, offload=True)[0] == everything
    assert decided(40, offload_train=False) == ((), "")
    assert decided(1000, offload_train=True, offload_train_parts=["optimizer"])[0] == ("optimizer",)
    assert decided(26, offload_train_parts=["optimizer"])[0] == ("optimizer",)
    assert decided(26, colocate=False, rollout_num_gpus=1) == ((), "")
    assert decided(26, overrides=FULL | {"nccl_ub": True})[0] == ()
    assert decided(None, device="cpu") == ((), "")
    leaving, text = decided(None, device="cpu", offload_train=True)
    assert leaving == everything and "GPU" not in text


def test_lines_say_what_leaves_and_what_is_short():
    _, text = decided(140.4)
    assert "the trainer's state stays on the device (as memory asks for it)" in text
    assert "while engines generate 132.54 GiB of 140.40 GiB: 68.88 GiB of the trainer, 0.4 of the GPU" in text
    assert "while it trains 75.45 GiB, a sleeping engine's and its own 3.40 GiB included" in text
    assert "too much" not in text
    _, text = decided(60)
    assert "gradients, optimizer leave the device, 44.95 GiB to the host and back a step" in text
    assert (
        "15.45 GiB too much; lower it with --max-tokens-per-gpu (now 9216), --rl-kernel-workspace-mib" in text
    )
    _, text = decided(10, offload_train_parts=["gradients"])
    assert "too much; lower --vllm-gpu-memory-utilization" in text
    _, text = decided(None)
    assert "  from 127.30 GiB on: nothing\n" in text and "  and training needs 75.45 GiB" in text


def test_flags_that_would_lower_a_peak():
    assert lowering(config(overrides={}))[:2] == [
        "--max-tokens-per-gpu (now 9216)",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 (now none)",
    ]
    assert "--rlk-fast auto (now off)" in lowering(config(rlk_fast="off"))
    plain = config(
        use_dynamic_batch_size=False,
        micro_batch_size=4,
        actor_num_gpus_per_node=2,
        use_distributed_optimizer=False,
    )
    assert lowering(plain)[0] == "--micro-batch-size (now 4)"
    assert lowering(plain)[-1] == "--use-distributed-optimizer (now off)"
