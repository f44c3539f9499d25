"""Tests slime's policy_loss_function, which a plug-in's custom loss calls: the training is that of --loss-type
policy_loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from trainer_cases import exported, make_config, make_samples, rank_data, train

from slime.megatron_backend.step.trainer import MegatronTrainer

PATH = "trainer_cases.policy_loss_of_slime"


@pytest.mark.parametrize(
    "flags",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coef": 0.01},
        {"advantage_estimator": "gspo", "use_tis": True, "calculate_per_token_loss": True},
    ],
    ids=["kl", "gspo"],
)
def test_a_custom_loss_calls_the_policy_loss(build, flags):
    """slime's plug-ins call policy_loss_function and add a term. Without a term, the training is the built-in one."""
    common = {"clip_grad": 0.0, "global_batch_size": 4, **flags}
    plain = build(**common)
    wanted, _ = train(plain)
    weights = exported(plain)
    trainer = build(**common, loss_type="custom_loss", custom_loss_function_path=PATH)
    result, _ = train(trainer)
    for mine, theirs in zip(result.steps, wanted.steps, strict=True):
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)
        assert mine["train/pg"] == pytest.approx(theirs["train/pg_loss"], rel=1e-4, abs=1e-6)
        assert mine["train/clipped"] == pytest.approx(theirs["train/pg_clipfrac"], abs=1e-6)
        if "use_kl_loss" in flags:
            assert mine["train/kl"] == pytest.approx(theirs["train/kl_loss"], rel=1e-4, abs=1e-7)
    for name, tensor in exported(trainer).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)


def trained(root: Path, name: str, rank: int, **flags: Any) -> dict[str, Any]:
    given = {"context_parallel_size": 2, "clip_grad": 0.0, "weight_dir": str(root / name)} | flags
    config = make_config(root, actor_num_gpus_per_node=2, **given)
    trainer = MegatronTrainer(config, rank, 2, init_method=f"file://{root / name}-store", local_rank=rank)
    try:
        found = trainer.train(0, rank_data(trainer.config, make_samples(), 0, 1))
        return {"steps": found.steps, "weights": exported(trainer)}
    finally:
        trainer.close()


def work(rank: int, root: Path) -> None:
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": PATH}
    found = [
        trained(root, "plain", rank, use_tis=True),
        trained(root, "custom", rank, use_tis=True, **custom),
    ]
    try:
        trained(root, "gspo", rank, advantage_estimator="gspo", **custom)
    except ValueError as error:
        found.append({"error": str(error)})
    torch.save(found, root / f"rank{rank}.pt")


@pytest.mark.slow
def test_context_parallel_ranks_have_parts_of_sequences(root):
    on_ranks(work, root, ranks=2)
    for rank in (0, 1):
        plain, custom, refused = torch.load(root / f"rank{rank}.pt")
        assert custom["steps"][0]["train/grad_norm"] == pytest.approx(
            plain["steps"][0]["train/grad_norm"], rel=1e-4
        )
        for name, tensor in custom["weights"].items():
            torch.testing.assert_close(tensor, plain["weights"][name], rtol=0, atol=1e-6)
        assert "policy_loss_function must have whole sequences" in refused["error"]
