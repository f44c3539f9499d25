"""One optimizer step of the real trainer on given samples, in separate processes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slime.checkpoints.hf_config import read_hf_config
from slime.config.hook_calls import Hooks
from slime.config.schema import Config
from slime.data.train_data import make_rank_data
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.rules.resolve import resolve
from slime.types import Sample
from vime.testing.ranks import run_ranks
from vime.testing.tiny_model import BYTES

GROUPS, PER_GROUP = 4, 2
"""Size of the rollout that `make_samples` returns."""


@dataclass(frozen=True)
class Trained:
    """The result of a step."""

    metrics: dict[str, float]
    """The metrics of the step, such as `train/loss` and `train/grad_norm`."""
    weights: dict[str, Tensor]
    """The weights after the step, under their names in the Hugging Face checkpoint."""


def train_step(
    model: Path, folder: Path, samples: Sequence[Sample] | None = None, *, ranks: int = 1, **flags: object
) -> Trained:
    """Trains one optimizer step on the CPU in float32.

    Args:
        model: the Hugging Face folder of the tiny model.
        folder: where the records of the step go.
        samples: finished samples with rewards. Default: those of `make_samples`.
        ranks: number of data-parallel ranks, one process each.
        flags: flags of the run, with underscores, such as `custom_loss_function_path`.

    Raises RuntimeError if a rank fails, with its error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rollout = list(samples) if samples is not None else make_samples()
    run_ranks(train_once, ranks, (model, folder, rollout, ranks, flags))
    return read_result(folder)


def make_samples(seed: int = 0) -> list[Sample]:
    """Returns `GROUPS` groups of `PER_GROUP` samples with random tokens, masks and rewards."""
    rng = random.Random(seed)
    samples = []
    for group in range(GROUPS):
        prompt = [rng.randrange(BYTES) for _ in range(rng.randint(2, 6))]
        for number in range(PER_GROUP):
            length = rng.randint(3, 12)
            samples.append(
                Sample(
                    index=group * PER_GROUP + number,
                    group_index=group,
                    tokens=prompt + [rng.randrange(BYTES) for _ in range(length)],
                    response_length=length,
                    loss_mask=[1, *(int(rng.random() < 0.8) for _ in range(length - 1))],
                    rollout_log_probs=[-math.log(BYTES) + 0.3 * rng.gauss(0, 1) for _ in range(length)],
                    reward=float(number) + round(rng.random(), 2),
                    status=Sample.Status.COMPLETED,
                )
            )
    return samples


def make_config(model: Path, folder: Path, ranks: int, flags: Mapping[str, object]) -> Config:
    """Returns the configuration of a step on all samples of `make_samples`."""
    size = GROUPS * PER_GROUP
    settings = {
        **{"hf_checkpoint": str(model), "load": str(model), "weight_dir": str(folder / "weights")},
        **{"run_dir": str(folder / "run"), "device": "cpu", "fp32": True, "actor_num_gpus_per_node": ranks},
        **{"rollout_batch_size": GROUPS, "n_samples_per_prompt": PER_GROUP, "global_batch_size": size},
        **{"num_rollout": 1, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 256, "lr": 1e-2},
        **{"adam_eps": 1.0, "weight_decay": 0.0, "distributed_timeout_minutes": 2, "rm_type": "zero"},
    }
    return resolve({**settings, **flags})


def train_once(
    rank: int, model: Path, folder: Path, samples: list[Sample], ranks: int, flags: Mapping[str, object]
) -> None:
    """Trains the step as one of `ranks` ranks. Rank 0 writes the result."""
    config = make_config(model, folder, ranks, flags)
    trainer = MegatronTrainer(config, rank, ranks, init_method=f"file://{folder}/store-{ranks}")
    try:
        hf_config = read_hf_config(config.rollout.hf_checkpoint)
        data = make_rank_data(trainer.config, Hooks(trainer.config), samples, ranks, hf_config)[rank]
        steps = trainer.train(0, data).steps
        weights = {name: tensor.cpu().clone() for name, tensor in export_hf(trainer.policy.model)}
        if rank == 0:
            torch.save((dict(steps[-1]), weights), folder / f"step-{ranks}.pt")
    finally:
        trainer.close()


def read_result(folder: Path, ranks: int | None = None) -> Trained:
    """Returns the result that `train_once` has written."""
    (file,) = folder.glob(f"step-{ranks or '*'}.pt")
    metrics, weights = torch.load(file, weights_only=True)  # ok: tensors and numbers only
    return Trained(metrics, weights)
