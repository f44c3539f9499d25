"""Tests --replay-kept-tokens: a KL compares two models over the same ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from trainer_cases import make_samples, rank_data

from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.types import Sample

KEPT = {"replay_kept_tokens": 4, "rollout_top_p": 0.9}


def kept_samples() -> list[Sample]:
    """Returns samples of three tokens: two tokens kept three ids, and one was not cut."""
    samples = make_samples()
    for sample in samples:
        offsets, ids = [0], list[int]()
        for i, token in enumerate(sample.tokens[-sample.response_length :]):
            ids += [token, (token + 1) % 90, (token + 7) % 90] if i % 3 else []
            offsets.append(len(ids))
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = ids, offsets
    return samples


def log_probs_of(directory: Any, sample: Sample) -> torch.Tensor:
    """Returns log-probs over each token's kept ids, from transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokens, count = torch.tensor(sample.tokens), sample.response_length
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, -count - 1 : -1]
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    for i in range(count):
        if kept := ids[offsets[i] : offsets[i + 1]]:
            cut = torch.ones(logits.shape[1], dtype=torch.bool)
            cut[kept] = False
            logits[i, cut] = -torch.inf
    return logits.log_softmax(-1).gather(1, tokens[-count:, None])[:, 0]


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_the_reference_has_the_log_probs_of_the_kept_ids(root, build, fast):
    trainer: MegatronTrainer = build(**KEPT, rlk_fast=fast, use_kl_loss=True)
    samples = kept_samples()
    data = rank_data(trainer.config, samples)
    trainer.train(0, data)
    for i, found in zip(data["sample_indices"], data["ref_log_probs"], strict=True):
        torch.testing.assert_close(found, log_probs_of(root / "reference", samples[i]), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "flags",
    [
        {"use_kl_loss": True},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1},
        {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "policy"},
        {"use_kl_loss": True, "lora_rank": 4},
    ],
    ids=["loss", "reward", "teacher", "adapters"],
)
def test_equal_models_have_no_kl(root, build, flags):
    if "opd_teacher_load" in flags:
        flags = flags | {"opd_teacher_load": str(root / "policy")}
    trainer: MegatronTrainer = build(**KEPT, ref_load=str(root / "policy"), **flags)
    data = rank_data(trainer.config, kept_samples())
    result = trainer.train(0, data)
    found = result.steps[0] | result.rollout
    name = next(n for n in ("rollout/opd_reverse_kl", "train/kl_loss", "rollout/kl") if n in found)
    assert abs(found[name]) < 1e-5
