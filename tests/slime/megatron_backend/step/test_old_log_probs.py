"""Tests old log-probs of a rollout with several steps: the first step computes the log-probs of its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from trainer_cases import exported, make_checkpoints, make_config, make_samples, rank_data

from slime.algo.needs import before_first_step
from slime.megatron_backend.step import scorers
from slime.megatron_backend.step.trainer import MegatronTrainer

STEPS = {"global_batch_size": 2, "max_tokens_per_gpu": 24}
"""Flags with four optimizer steps."""

ALONE: dict[str, dict[str, Any]] = {
    "one-pass": {"use_tis": True, "use_kl_loss": True, "use_unbiased_kl": True, "entropy_coef": 0.01},
    "native": {"rlk_fast": "off"},
    "opsm": {"use_opsm": True},
}
PAIRS: dict[str, dict[str, Any]] = {
    "dp": {},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old")
    make_checkpoints(root)
    return root


def trained(
    root: Path, name: str, rank: int = 0, ranks: int = 1, *, full: bool, **flags: Any
) -> dict[str, Any]:
    """Trains a rollout. With `full`, the pass covers all samples, as if they were needed before the first step."""
    given = {"weight_dir": str(root / f"weights-{name}-{full}")} | STEPS | flags
    config = make_config(root, actor_num_gpus_per_node=ranks, **given)
    store = f"file://{root}/store-{name}-{full}"
    trainer = MegatronTrainer(config, rank, ranks, init_method=store, local_rank=rank)
    data = rank_data(config, make_samples(), trainer.info.dp_rank, trainer.info.dp_size)
    seen: list[int] = []
    its_pass = trainer.trainings[-1].old.its_pass
    forward = its_pass.over

    def counted(data: Any, micro_batches: list[list[int]]) -> Any:
        seen.extend(i for samples in micro_batches for i in samples)
        return forward(data, micro_batches)

    its_pass.over = counted  # type: ignore[method-assign]
    decide = scorers.before_first_step
    scorers.before_first_step = lambda *_: full or decide(*_)
    try:
        result = trainer.train(0, data)
    finally:
        scorers.before_first_step = decide
    first = {i for samples in data["micro_batch_indices"][: data["num_microbatches"][0]] for i in samples}
    out = {
        "steps": result.steps,
        "rollout": result.rollout,
        "old": data["old_log_probs"],
        "weights": exported(trainer),
        "in pass": sorted(seen),
        "later": sorted(set(range(len(data["tokens"]))) - first),
    }
    assert data["log_probs"] is data["old_log_probs"]
    trainer.close()
    return out


def assert_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compares to the last bit."""
    assert got["in pass"] == got["later"] and wanted["in pass"] == list(range(len(wanted["old"])))
    assert 0 < len(got["in pass"]) < len(wanted["in pass"])
    assert (got["steps"], got["rollout"]) == (wanted["steps"], wanted["rollout"])
    assert len(got["steps"]) == 4 and "rollout/log_probs" in got["rollout"]
    assert all(torch.equal(a, b) for a, b in zip(got["old"], wanted["old"], strict=True))
    assert all(torch.equal(t, wanted["weights"][name]) for name, t in got["weights"].items())


@pytest.mark.parametrize("case", ALONE)
def test_leaving_out_the_first_step_changes_no_bit(root, case):
    got, wanted = (trained(root, case, full=full, **ALONE[case]) for full in (False, True))
    assert_equal(got, wanted)


def work(rank: int, root: Path) -> None:
    found = {
        name: [trained(root, name, rank, 2, full=full, **flags) for full in (False, True)]
        for name, flags in PAIRS.items()
    }
    torch.save(found, root / f"rank{rank}.pt")


def test_two_ranks_leave_out_the_first_step(root):
    on_ranks(work, root, ranks=2)
    for rank in (0, 1):
        for got, wanted in torch.load(root / f"rank{rank}.pt").values():
            assert_equal(got, wanted)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ({}, False),
        ({"use_tis": True}, False),
        ({"kl_coef": 0.1}, False),  # GRPO's advantages have no KL
        ({"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"}, True),
        ({"kl_coef": 0.1, "custom_advantage_function_path": "trainer_cases.advantage_hook"}, True),
        ({"get_mismatch_metrics": True}, True),
        ({"advantage_estimator": "gspo"}, True),
        ({"custom_advantage_function_path": "trainer_cases.advantage_hook"}, True),
        ({"custom_megatron_before_train_step_hook_path": "trainer_cases.step_hook"}, True),
        ({"rlk_consistency": "audit"}, True),
        ({"use_routing_replay": True}, True),
        ({"loss_type": "custom_loss", "custom_loss_function_path": "trainer_cases.reinforce_loss"}, True),
    ],
)
def test_what_needs_them_before_the_first_step(root, flags, needed):
    assert before_first_step(make_config(root, **STEPS, **flags), 4) is needed


def test_one_step_needs_no_pass_for_the_audit_and_step_hooks(root):
    for flags in (
        {"rlk_consistency": "audit"},
        {"custom_megatron_before_train_step_hook_path": "trainer_cases.step_hook"},
    ):
        assert not before_first_step(make_config(root, **flags), 1)


def test_a_log_prob_that_is_not_finite_ends_the_run_before_the_first_step(root, build):
    trainer = build(**STEPS)
    data = rank_data(trainer.config, make_samples())
    its_pass = trainer.trainings[-1].old.its_pass
    forward = its_pass.over

    def spoiled(*given: Any) -> Any:
        found = forward(*given)
        found[max(found)][0] = float("nan")
        return found

    its_pass.over = spoiled
    trainer.trainings[-1].optimizer_steps = lambda *_: pytest.fail("trained")
    with pytest.raises(FloatingPointError, match="old_log_probs must be finite, got nan in rollout 3"):
        trainer.train(3, data)
