"""Tests whole runs with --rlk-bitwise: every token's log-prob has the same bits in trainer and engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from family_engine import with_remote_config
from train_fixtures import World, make_world, rows, run, samples, vime

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
"""Unscaled rotary frequencies."""
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
"""Frequencies of Llama 3.1, whose waves of more than 16 tokens are stretched."""
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "original_max_position_embeddings": 64,
}
"""Frequencies of YaRN, with which cos and sin are multiplied by 1.14."""
BITWISE = ("--colocate", "--rlk-bitwise", "--rlk-consistency", "strict")


def compared(world: World, name: str, rollouts: int, *flags: str, ranks: int = 1) -> int:
    """Checks that every token of a run has the same bits on both sides, with `ranks` tensor-parallel ranks, and
    returns the number of tokens. From the second update on, weights are written directly into the parameters."""
    count = str(ranks)
    parallel = ("--tensor-model-parallel-size", count, "--rollout-num-gpus-per-engine", count)
    argv = [*world.grpo(name, rollouts=rollouts), *BITWISE, "--actor-num-gpus-per-node", count, *parallel]
    run(vime("train", *argv, *flags), world.root / f"{name}.out")
    found = rows(world.root / name, "rollout/step")
    audits: list[dict[str, Any]] = [
        json.loads(line) for line in (world.root / name / "audit.jsonl").read_text().splitlines()
    ]
    assert sorted(found) == list(range(rollouts)) and len(audits) == rollouts
    for rollout, row in found.items():
        tokens = sum(s["response_length"] for s in samples(world.root / name, rollout))
        assert row["rl_kernel/bitwise/differing"] == row["consistency/abs_dlogp_max"] == 0
        assert row["consistency/bitwise_equal_tokens"] == row["consistency/tokens"] == tokens
    log = (world.root / name / "logs" / "engine-0.log").read_text()
    assert log.count("weight updates are copied into") == ranks
    return sum(int(audit["tokens"]) for audit in audits)


def test_two_steps_have_the_same_bits(world: World) -> None:
    assert compared(world, "two", 2) > 400


@pytest.mark.slow
def test_a_part_of_the_operators_leaves_some_bits_different(world: World) -> None:
    flags = ("--rlk-bitwise-operators", "head,norm,activation,rotary", "--rlk-consistency", "audit")
    flags = ("--colocate", "--actor-num-gpus-per-node", "1", "--rlk-bitwise", *flags)
    run(vime("train", *world.grpo("part", rollouts=1), *flags), world.root / "part.out")
    row = rows(world.root / "part", "rollout/step")[0]
    assert 0 < row["rl_kernel/bitwise/differing"] < row["consistency/tokens"]
    assert row["consistency/abs_dlogp_max"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)], ids=["tp", "sp"])
def test_two_ranks_on_each_side_have_the_same_bits(world: World, flags: tuple[str, ...]) -> None:
    assert compared(world, f"ranks{len(flags)}", 2, *flags, ranks=2) > 400


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all_gather", "a2a"])
def test_context_parallel_ranks_have_the_bits_of_an_engine_of_one(world: World, way: str) -> None:
    flags = ("--actor-num-gpus-per-node", "2", "--context-parallel-size", "2", "--cp-comm-type", way)
    assert compared(world, way, 2, *flags) > 400


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_have_the_same_bits(world: World, ranks: int) -> None:
    """Each rollout has two optimizer steps and a temperature, so that old log-probs need a separate pass."""
    flags = ("--global-batch-size", "16", "--rollout-max-response-len", "24", "--rollout-temperature", "0.9")
    assert compared(world, f"twenty{ranks}", 20, *flags, ranks=ranks) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes", "flags"),
    [
        ("mistral-tiny", {"sliding_window": None}, ()),
        ("mistral-tiny", {"sliding_window": 9}, ()),
        ("mimo-tiny", {}, ("--trust-remote-code",)),
        ("llama-tiny", {"rope_scaling": None, "rope_parameters": PLAIN}, ()),
        ("llama-tiny", {"rope_scaling": None, "rope_parameters": LLAMA3}, ()),
        ("llama-tiny", {"rope_scaling": None, "rope_parameters": YARN}, ()),
    ],
    ids=["mistral", "window", "mimo", "llama", "llama3", "yarn"],
)
def test_other_families_have_the_same_bits(
    arch: str, changes: dict[str, object], flags: tuple[str, ...]
) -> None:
    for world in make_world(arch=arch):
        file = world.model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        if arch == "mimo-tiny":
            with_remote_config(world.model, "mimo")
        assert compared(world, "family", 2, *flags) > 400
