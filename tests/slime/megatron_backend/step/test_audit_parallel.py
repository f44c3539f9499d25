"""Tests the audit on two trainer ranks over gloo: one rank's figures, one line per step, one error for both ranks."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_cases import moved, truthful_samples, with_facts
from rank_processes import on_ranks
from trainer_cases import make_checkpoints, make_config

from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.rollout.debug_data import load_with_facts
from slime.types import Sample

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"max_tokens_per_gpu": 24},
    "dp-passes": {"max_tokens_per_gpu": 24, "global_batch_size": 4},
    "tp": {"tensor_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "cp-logp": {"context_parallel_size": 2, "rl_kernel_ops": ["logp"]},
    "pp": {"pipeline_model_parallel_size": 2},
    "pp-passes": {"pipeline_model_parallel_size": 2, "global_batch_size": 4},
}


def run(name: str, flags: dict[str, Any], root: Path, rank: int, ranks: int) -> dict[str, Any]:
    """Audits a rollout, then one whose last sample holds a NaN, and returns the metrics and the error."""
    paths = {"weight_dir": str(root / f"weights-{name}"), "run_dir": str(root / f"run-{name}")}
    config = make_config(root, rlk_consistency="audit", actor_num_gpus_per_node=ranks, **paths, **flags)
    trainer = MegatronTrainer(config, rank, ranks, init_method=f"file://{root}/store-{name}", local_rank=rank)
    info = trainer.info
    samples = [Sample.from_dict(s) for s in torch.load(root / "samples.pt", weights_only=True)]
    data = with_facts(config, copy.deepcopy(samples), info.dp_rank, info.dp_size)
    found = trainer.train(0, data).rollout
    for s in samples:
        s.weight_versions = [1]
    data = with_facts(config, samples, info.dp_rank, info.dp_size)
    for i, index in enumerate(data["sample_indices"]):
        if index == 6:
            data["rollout_log_probs"][i][0] = math.nan
    try:
        trainer.train(1, data)
        said = ""
    except ValueError as error:
        said = str(error)
    trainer.close()
    return {
        "metrics": {k: v for k, v in found.items() if k.startswith("consistency/")},
        "said": said,
        "indices": data["sample_indices"],
    }


def work(rank: int, root: Path) -> None:
    out = {name: run(name, flags, root, rank, 2) for name, flags in LAYOUTS.items()}
    torch.save(out, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    make_checkpoints(root)
    samples = truthful_samples(root)
    moved(samples)
    samples[3].weight_versions = [4]
    torch.save([s.to_dict() for s in samples], root / "samples.pt")
    return root


@pytest.fixture(scope="module")
def one(root):
    return run("one", {}, root, 0, 1)


@pytest.fixture(scope="module")
def two(root, one):
    on_ranks(work, root, ranks=2)
    return [torch.load(root / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_find_what_one_finds(one, two, layout):
    wanted = one["metrics"]
    assert wanted["consistency/tokens"] > 30 and wanted["consistency/not_comparable/weight_version"] > 2
    for rank in (0, 1):
        got = two[rank][layout]["metrics"]
        assert got == pytest.approx(wanted, rel=1e-5, abs=2e-6)
        assert got == two[0][layout]["metrics"], "every rank holds the same figures"


def test_percentiles_are_values_of_tokens_of_either_rank(root, one, two):
    """Only one rank has the token of a percentile, so a mean of the ranks' percentiles would be wrong."""
    names = [f"consistency/abs_dlogp_{x}" for x in ("p50", "p90", "p99", "max")]
    assert [two[0]["dp"]["metrics"][n] for n in names] == pytest.approx(
        [one["metrics"][n] for n in names], abs=2e-6
    )
    assert two[0]["dp"]["indices"] != two[1]["dp"]["indices"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_zero_writes_one_line_a_rollout(root, two, layout):
    lines = (root / f"run-{layout}" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout_id"] for line in lines] == [0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_of_one_rank_stops_both_and_the_whole_batch_is_saved(root, one, two, layout):
    assert "got position 0 of sample 6 (token " in one["said"] and "rollout nan" in one["said"]
    for rank in (0, 1):
        said = two[rank][layout]["said"]
        assert said.partition(" (token")[0] == one["said"].partition(" (token")[0]
        assert said.partition(";")[0] == two[0][layout]["said"].partition(";")[0]
    groups, facts = load_with_facts(str(root / f"run-{layout}" / "audit" / "{rollout_id}.pt"), 1)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7, 8]]
    assert facts["temperature"] == 1.0 and facts["dtype"] == "float32"
