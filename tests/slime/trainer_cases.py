"""Provides a tiny policy and reference, irregular rollouts, and the hooks of the trainer tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron_cases import VOCAB, tiny_checkpoint
from torch import Tensor, nn

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, policy_loss_function
from slime.checkpoints.hf_config import read_hf_config
from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.train_data import make_rank_data
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.rules.resolve import resolve
from slime.types import Sample, TrainData

CALLS: list[tuple[Any, ...]] = []
"""The arguments of the recording hooks below, in order of their calls."""


def make_checkpoints(root: Path, kind: str = "qwen3", **changes: Any) -> None:
    """Writes root/policy, and root/reference with the same shape and slightly different weights."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16} | changes
    policy = tiny_checkpoint(root / "policy", kind, **shape)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    policy.save_pretrained(root / "reference")


def make_config(root: Path, **flags: Any) -> Config:
    """Returns a config for 8 rollouts of one optimizer step in several micro-batches. With Adam's large epsilon, the
    step is a smooth function of the gradient, so rounding differences stay small in the weights.
    """
    given = {
        "hf_checkpoint": str(root / "policy"),
        "load": str(root / "policy"),
        "ref_load": str(root / "reference"),
        "weight_dir": str(root / "weights"),
        "run_dir": str(root / "run"),
        "device": "cpu",
        "fp32": True,
        "actor_num_gpus_per_node": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "num_rollout": 4,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 32,
        "eps_clip_high": 0.28,
        "lr": 0.5,
        "adam_eps": 1.0,
        "weight_decay": 0.0,
        "distributed_timeout_minutes": 1,
    }
    return resolve(given | flags)


def make_samples(seed: int = 0) -> list[Sample]:
    """Makes 4 groups of 2 rollouts: different lengths, masks with gaps, one removed sample, one rollout with two
    samples.

    The samples of a group have one prompt, except the two of group 2.
    """
    rng = random.Random(seed)
    prompts: dict[int, list[int]] = {}
    samples = []
    for index in range(9):
        prompt, response = rng.randint(2, 6), rng.randint(3, 12)
        group = min(index, 7) // 2
        tokens = [rng.randrange(VOCAB) for _ in range(prompt + response)]
        if group != 2:
            tokens = prompts.setdefault(group, tokens[:prompt]) + tokens[prompt:]
        samples.append(
            Sample(
                index=index,
                group_index=group,
                rollout_id=100 if index in (7, 8) else None,
                tokens=tokens,
                response_length=response,
                loss_mask=[1, *(int(rng.random() < 0.8) for _ in range(response - 1))],
                rollout_log_probs=[-4.6 + 0.3 * rng.gauss(0, 1) for _ in range(response)],
                reward=round(rng.random() + index % 2, 2),
                remove_sample=index == 4,
                status=Sample.Status.COMPLETED,
            )
        )
    return samples


def rank_data(config: Config, samples: list[Sample], rank: int = 0, ranks: int = 1) -> TrainData:
    """Makes new train data for one data-parallel rank, because training adds columns to its input."""
    return make_rank_data(
        config, Hooks(config), samples, ranks, read_hf_config(config.rollout.hf_checkpoint)
    )[rank]


def exported(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Returns copies of the weights under their HF names."""
    return {name: tensor.cpu().clone() for name, tensor in export_hf(trainer.policy.model)}


def init_hook(args: Any) -> None:
    CALLS.append(("init", args))


def read_mismatch_settings(args: Any) -> None:
    """Sets the example file's keys that are not flags on `args`, as --custom-config-path does."""
    path = Path(__file__).parents[2] / "examples/plugins/mismatch_correction.yaml"
    vars(args).update(yaml.safe_load(path.read_text()))


def data_hook(args: Any, rollout_id: int, data: TrainData) -> None:
    CALLS.append(("data", args, rollout_id, data))


def log_prob_hook(args: Any, model: list[Any], store_prefix: str) -> None:
    CALLS.append(("log_prob", args, model, store_prefix))


def step_hook(
    args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any
) -> None:
    CALLS.append(("step", args, rollout_id, step_id, model, optimizer, scheduler))


def kl_hook(args: Any, rollout_id: int, step_id: int, *_: Any) -> None:
    """Anneals a flag, as plug-ins of slime do."""
    args.kl_loss_coef = 0.5 - 0.25 * step_id


def advantage_hook(args: Any, data: TrainData) -> None:
    CALLS.append(("advantage", args, sorted(data)))
    data["advantages"] = data["returns"] = [torch.full_like(lp, 2.0) for lp in data["log_probs"]]


def reinforce_loss(args: Any, batch: TrainData, logits: Tensor, sum_of_sample_mean: Any) -> tuple:
    """Computes -A log p. Its gradient equals the clipped objective's gradient if the policy is still the old policy."""
    _, out = get_log_probs_and_entropy(
        logits,
        args=args,
        with_entropy=True,
        **{name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")},
    )
    log_probs, entropy = torch.cat(out["log_probs"]), torch.cat(out["entropy"])
    CALLS.append(("loss", args, tuple(logits.shape), logits.dtype, sorted(batch)))
    loss = -sum_of_sample_mean(torch.cat(batch["advantages"]) * log_probs)
    return loss, {"my_entropy": sum_of_sample_mean(entropy), "count": len(batch["tokens"])}


def policy_loss_of_slime(args: Any, batch: TrainData, logits: Tensor, sum_of_sample_mean: Any) -> tuple:
    """Returns the built-in policy loss, to which plug-ins add terms."""
    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    return loss, {
        "pg": metrics["pg_loss"],
        "kl": metrics.get("kl_loss", loss),
        "clipped": metrics["pg_clipfrac"],
    }


def train(trainer: MegatronTrainer, rollout_id: int = 0, seed: int = 0) -> tuple[Any, dict]:
    data = rank_data(trainer.config, make_samples(seed))
    return trainer.train(rollout_id, data), data


def hf_log_probs(model: nn.Module, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the log-prob for each response token and the entropy of its distribution, from full logits."""
    tokens = torch.tensor(sample.tokens)
    rows = slice(len(tokens) - sample.response_length - 1, len(tokens) - 1)
    table = torch.log_softmax(model(tokens[None]).logits[0, rows] / temperature, dim=-1)
    entropy = -(table.exp() * table).sum(-1)
    return table.gather(-1, tokens[-sample.response_length :, None])[:, 0], entropy
