"""Tests --lora-dropout: scoring passes compute the engines' model without dropout, and training passes draw dropout
masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from audit_cases import with_facts
from trainer_cases import hf_log_probs, make_samples, rank_data

from slime.data.rank_data import RankData
from slime.megatron_backend.checkpoint.merged import merged
from slime.megatron_backend.checkpoint.weights import export_hf, live
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.rollout.facts import run_facts
from slime.types import Sample

DROPOUT = {"lora_rank": 4, "lora_alpha": 8.0, "lora_dropout": 0.1, "lr": 0.3}


def served(root: Any, trainer: MegatronTrainer) -> Any:
    """Returns the policy in transformers, with the adapters merged in."""
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    weights = dict(export_hf(trainer.policy.model, merged(trainer.policy.model, live)))
    model.load_state_dict({k: v.clone() for k, v in weights.items()}, strict=False)
    return model


def log_probs_of(model: Any, samples: list[Sample]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [hf_log_probs(model, sample, 1.0)[0] for sample in samples]


def truthful(model: Any, samples: list[Sample]) -> list[Sample]:
    for sample, found in zip(samples, log_probs_of(model, samples), strict=True):
        sample.rollout_log_probs, sample.weight_versions = found.tolist(), [1]
    return samples


def moved(root: Any, build: Any, **flags: Any) -> tuple[MegatronTrainer, Any]:
    """Returns a trainer after a step, whose adapters are no longer zero, and the model that its engines would have."""
    trainer = build(**DROPOUT, **{"ref_load": str(root / "policy")} | flags)
    trainer.train(0, rank_data(trainer.config, make_samples()))
    return trainer, served(root, trainer)


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "flags",
    [{}, {"global_batch_size": 2}, {"advantage_estimator": "gspo"}, {"use_tis": True}, {"rlk_fast": "off"}],
    ids=["one-step", "four-steps", "gspo", "tis", "native"],
)
def test_old_log_probs_are_those_of_the_served_policy(root, build, flags):
    trainer, model = moved(root, build, use_kl_loss=True, **flags)
    samples = truthful(model, make_samples(1))
    data: RankData = rank_data(trainer.config, samples)
    result = trainer.train(1, data)
    in_order = [samples[i] for i in data["sample_indices"]]
    assert_near(data["old_log_probs"], log_probs_of(model, in_order))
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "policy")
    assert_near(data["ref_log_probs"], log_probs_of(base, in_order))
    first = result.steps[0]
    assert first["train/train_rollout_logprob_abs_diff_max"] < 2e-5
    assert abs(first["train/ppo_kl"]) > 1e-4  # the training pass draws masks
    if flags.get("use_tis"):
        assert first["train/tis_abs"] < 2e-5


@pytest.mark.parametrize("flags", [{}, {"use_rollout_logprobs": True}], ids=["own", "engine"])
def test_the_audit_compares_log_probs_without_dropout(root, build, tmp_path, flags):
    paths = {"run_dir": str(tmp_path / "run")}
    trainer = build(**DROPOUT, ref_load=str(root / "policy"), rlk_consistency="audit", **paths, **flags)
    trainer.train(0, with_facts(trainer.config, truthful(served(root, trainer), make_samples())))
    samples = truthful(served(root, trainer), make_samples(1))
    data = with_facts(trainer.config, samples, facts=run_facts(trainer.config))
    found = trainer.train(1, data).rollout
    assert found["consistency/tokens"] > 30
    assert found["consistency/abs_dlogp_max"] < 2e-5


def test_a_critic_is_scored_without_dropout_and_trained_with_it(root, build):
    trainer, _ = moved(root, build, advantage_estimator="ppo", critic_lr=0.3)
    found = []
    for _ in range(2):
        data = rank_data(trainer.config, make_samples(1))
        trainer._score(1, data)
        found.append(data["values"])
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found, strict=True))
    critic = trainer.models.learners["critic"].model
    trainer.train(1, rank_data(trainer.config, make_samples(1)))
    assert all(part.training for part in (critic if isinstance(critic, list) else [critic]))
