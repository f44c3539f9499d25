"""Makes rollouts whose tiny policy's log-probs are changed by known amounts, and rank data with their facts."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers
from trainer_cases import make_samples

from slime.checkpoints.hf_config import read_hf_config
from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.train_data import make_rank_data
from slime.rollout.facts import Facts, attach, run_facts
from slime.types import Sample, TrainData


def truthful_samples(root: Path, *, temperature: float = 1.0, seed: int = 0) -> list[Sample]:
    """Returns make_samples() with the log-probs of root/policy in float64, and weight version 0."""
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "policy", dtype=torch.float64)
    samples = make_samples(seed)
    with torch.no_grad():
        for s in samples:
            tokens = torch.tensor(s.tokens)
            rows = slice(len(tokens) - s.response_length - 1, len(tokens) - 1)
            table = torch.log_softmax(model(tokens[None]).logits[0, rows] / temperature, -1)
            s.rollout_log_probs = table.gather(-1, tokens[-s.response_length :, None])[:, 0].tolist()
            s.weight_versions = [0]
    return samples


def moved(samples: list[Sample], seed: int = 1) -> list[float]:
    """Changes every log-prob by up to 0.4 nats. Returns trainer - rollout for each active token, in order."""
    rng = random.Random(seed)
    differences = []
    for s in samples:
        for position, mask in enumerate(s.loss_mask):
            d = rng.choice([-1, 1]) * 0.4 * rng.random() ** 3
            s.rollout_log_probs[position] -= d
            if mask and not s.remove_sample:
                differences.append(d)
    return differences


def with_facts(
    config: Config, samples: list[Sample], rank: int = 0, ranks: int = 1, facts: Facts | None = None
) -> TrainData:
    """Returns the data that the rollout manager sends to one data-parallel rank."""
    hf_config = read_hf_config(config.rollout.hf_checkpoint)
    data = make_rank_data(config, Hooks(config), samples, ranks, hf_config)
    attach(data, samples, run_facts(config) if facts is None else facts)
    return data[rank]
