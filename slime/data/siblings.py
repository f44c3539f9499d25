"""A schedule that keeps the samples of one rollout in one micro-batch, for losses that compare them."""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.sections.data import DataConfig
from slime.config.sections.megatron import MegatronConfig
from slime.data.packing import Schedule, plan_steps
from slime.models.decoder import Hf


def plan_together(
    data: DataConfig,
    megatron: MegatronConfig,
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    dp_size: int,
    hf_config: Hf,
    response_lengths: Sequence[int],
) -> Schedule:
    """`plan_steps` of whole rollouts, each as long as its samples together. --micro-batch-size counts rollouts."""
    of_rollout: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_ids):
        of_rollout.setdefault(rollout, []).append(position)
    units = list(of_rollout.values())
    totals, responses = (
        [sum(lengths[i] for i in unit) for unit in units] for lengths in (total_lengths, response_lengths)
    )
    found = plan_steps(data, megatron, totals, range(len(units)), dp_size, hf_config, responses)

    def samples(of_bin: list[int]) -> list[int]:
        return [i for unit in of_bin for i in units[unit]]

    ranks = [[[samples(of_bin) for of_bin in step] for step in rank] for rank in found.ranks]
    return Schedule(ranks, [samples(step) for step in found.step_samples], found.global_batch_sizes)
