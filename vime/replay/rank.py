"""A rank of a replay: the run's own trainer on the saved samples."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.checkpoints.hf_config import read_hf_config
from slime.config.hook_calls import Hooks
from slime.data.train_data import make_rank_data
from slime.megatron_backend.model.gpt import get_parts
from slime.megatron_backend.receipts import iter_named_state
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.rollout.debug_data import load_debug_rollout_data
from vime.replay.job import VALUES, ReplayJob


def replay_rank(rank: int, job: ReplayJob) -> None:
    """Trains the rollouts as one rank. The receipt of the trainer has the result."""
    if job.threads:
        torch.set_num_threads(job.threads)
    config = job.config
    trainer = MegatronTrainer(
        config, rank, config.world_size, init_method=f"file://{job.folder}/store", local_rank=rank
    )
    try:
        hf_config = read_hf_config(config.rollout.hf_checkpoint)
        for rollout_id, template in job.samples.items():
            groups = load_debug_rollout_data(template, rollout_id)
            samples = [sample for group in groups for sample in group]
            ranks = make_rank_data(config, Hooks(config), samples, config.data_parallel_size, hf_config)
            trainer.train(rollout_id, ranks[trainer.info.dp_rank])
        if job.keep:
            torch.save(find_values(trainer, job.keep), job.folder / VALUES.format(rank=rank))
    finally:
        trainer.close()


def find_values(trainer: MegatronTrainer, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns the tensors of the policy's state with these names on the host."""
    learner = trainer.policy
    learner.residence.bring("parameters", "optimizer")
    named = iter_named_state(get_parts(learner.model), learner.optimizer)
    return {name: tensor.detach().cpu().clone() for name, tensor in named if name in names}
