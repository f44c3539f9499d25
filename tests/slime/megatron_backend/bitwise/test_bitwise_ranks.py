"""Tests --rlk-bitwise in trainers of two tensor-parallel ranks over gloo: bits are equal in every packing, and steps
are those of one rank with the default operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from audit_cases import with_facts
from rank_processes import on_ranks
from torch import Tensor
from trainer_cases import exported, make_checkpoints, make_config, make_samples

from slime import operators
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.step.heads import build_head
from slime.megatron_backend.step.scorers import compute_column, make_log_probs
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.models import read_decoder
from slime.rules.kernels import check_bitwise_model, check_kernels
from vime.vllm.backend import engine_facts

BITWISE = {"rlk_bitwise": True, "rlk_consistency": "strict"}
TWO = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus_per_engine": 2}
SEQUENCE = TWO | {"sequence_parallel": True}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {}),
    # This case has biases of queries, keys and values, and fewer key heads than ranks.
    "one group": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "experts": ("qwen3_moe", {}),
}
CASES = {
    "tied tp": ("tied", TWO),
    "tied sp": ("tied", SEQUENCE),
    "one group tp": ("one group", TWO),
    "one group sp": ("one group", SEQUENCE),
    "experts ep": ("experts", SEQUENCE | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "experts etp": ("experts", SEQUENCE | {"expert_tensor_parallel_size": 2}),
}
ALONE, TOGETHER = [[i] for i in range(9)], [[8, 0, 3], [1, 2, 4, 5, 6, 7]]


def run(name: str, root: Path, flags: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Returns log-probs of the samples in two packings, and a step with the first packing's log-probs as the
    engine's."""
    paths = {"weight_dir": str(root / f"weights {name}"), "run_dir": str(root / f"run {name}")}
    config = make_config(root, rollout_temperature=0.9, **paths, **flags)
    trainer = MegatronTrainer(config, rank, ranks, init_method=f"file://{root}/store-{name}", local_rank=rank)
    samples, model = make_samples(), trainer.policy.model
    data = with_facts(config, samples)
    of_tokens = make_log_probs(build_head(config, operators.pass_head(config), model, trainer.info))
    found: dict[str, Any] = {}
    for packing, rows in (("alone", ALONE), ("together", TOGETHER)):
        batches = trainer.batches.pack_pass(data, rows, policy=True)
        values = compute_column(model, trainer.info, of_tokens, batches, len(rows), data.response_lengths)
        found[packing] = [values[i] for i in range(len(samples))]
    places = {index: i for i, index in enumerate(data["sample_indices"])}
    for sample in samples:
        sample.weight_versions = [0]
        sample.rollout_log_probs = found["alone"][places[sample.index]].tolist()
    result = trainer.train(0, with_facts(config, samples))
    found |= {"rollout": result.rollout, "steps": result.steps, "weights": exported(trainer)}
    trainer.close()
    return found


def work(rank: int, root: Path) -> None:
    found = {
        name: run(name, root / checkpoint, flags | BITWISE, rank, 2)
        for name, (checkpoint, flags) in CASES.items()
    }
    torch.save(found, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name, (kind, shape) in CHECKPOINTS.items():
        make_checkpoints(folder / name, kind, **shape)
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, dict[str, Any]]:
    """Trains on one rank with the default operators."""
    flags = {"rlk_consistency": "audit"}
    return {name: run("one", folder / name, flags, 0, 1) for name in CHECKPOINTS}


@pytest.fixture(scope="module")
def two(folder: Path, one: Any) -> list[dict[str, dict[str, Any]]]:
    on_ranks(work, folder, ranks=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_same_bits_in_every_packing(one, two, case):
    checkpoint, _ = CASES[case]
    for rank in two:
        assert equal(rank[case]["alone"], rank[case]["together"])
        other = f"{checkpoint} tp"
        assert equal(rank[case]["alone"], two[0][other if other in CASES else case]["alone"])
        for found, wanted in zip(rank[case]["alone"], one[checkpoint]["alone"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one_with_the_default_operators(one, two, case):
    wanted = one[CASES[case][0]]
    for rank in two:
        rollout = rank[case]["rollout"]
        assert rollout["rl_kernel/bitwise/differing"] == 0
        assert rollout["consistency/bitwise_equal_tokens"] == rollout["consistency/tokens"] > 30
        for found, step in zip(rank[case]["steps"], wanted["steps"], strict=True):
            for name in ("train/loss", "train/grad_norm"):
                assert found[name] == pytest.approx(step[name], rel=1e-4, abs=1e-6), name
        for name, tensor in wanted["weights"].items():
            torch.testing.assert_close(rank[case]["weights"][name], tensor, rtol=0, atol=1e-5, msg=name)


def checked(folder: Path, engine: dict[str, Any], **flags: Any) -> None:
    """Applies the rules for an engine with these arguments of vLLM."""
    flags = {"colocate": False, "rollout_num_gpus": 2, "engine_facts": engine_facts(engine)} | flags
    c = make_config(folder / "tied", **flags, **BITWISE)
    check_kernels(c)
    check_bitwise_model(c, read_decoder(load_hf_config(folder / "experts" / "policy")))


@pytest.mark.parametrize(
    ("engine", "flags", "message"),
    [
        (
            {},
            {"rollout_num_gpus_per_engine": 2},
            "--rollout-num-gpus-per-engine must equal --tensor-model-parallel-size with --rlk-bitwise, got 2 and 1",
        ),
        ({}, TWO | {"rollout_num_gpus_per_engine": 1}, "the same bits only if engine and trainer have equally many"),
        ({"pipeline_parallel_size": 2}, TWO, "--vllm-pipeline-parallel-size must be 1 with --rlk-bitwise, got 2"),
        ({"data_parallel_size": 2}, TWO, "--vllm-data-parallel-size must be 1 with --rlk-bitwise, got 2"),
        (
            {"enable_expert_parallel": True},
            TWO | {"expert_tensor_parallel_size": 2},
            "--expert-tensor-parallel-size must be the number of parts of an expert in an engine .*, got 2 and 1",
        ),
        (
            {},
            TWO | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "--expert-tensor-parallel-size must be the number of parts of an expert in an engine .*, got 1 and 2",
        ),
        ({"decode_context_parallel_size": 2}, TWO, "engines must have .* no context parallelism with --rlk-bitwise"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_go_with_it(folder, engine, flags, message):
    with pytest.raises(ValueError, match=message):
        checked(folder, engine, **flags)


@pytest.mark.parametrize("flags", [TWO, SEQUENCE, {}])
def test_equal_ranks_go_with_it(folder, flags):
    checked(folder, {"decode_context_parallel_size": 1}, **flags)
