"""Two more schedules: the first keeps the samples of a rollout in one micro-batch, for losses that compare samples. The
second is for a held-out set."""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.sections.data import DataConfig
from slime.config.sections.megatron import MegatronConfig
from slime.data.packing import Schedule, choose_bins, plan_steps
from slime.models import read_decoder
from slime.models.decoder import Hf
from slime.plan.stages import micro_batch_group


def plan_together(
    data: DataConfig,
    megatron: MegatronConfig,
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    dp_size: int,
    hf_config: Hf,
    response_lengths: Sequence[int],
) -> Schedule:
    """Calls `plan_steps` with whole rollouts as units. A rollout is as long as its samples together, and
    --micro-batch-size counts rollouts."""
    units = _rollouts(rollout_ids)
    totals, responses = (
        [sum(lengths[i] for i in unit) for unit in units] for lengths in (total_lengths, response_lengths)
    )
    found = plan_steps(data, megatron, totals, range(len(units)), dp_size, hf_config, responses)

    def samples(of_bin: list[int]) -> list[int]:
        return [i for unit in of_bin for i in units[unit]]

    ranks = [[[samples(of_bin) for of_bin in step] for step in rank] for rank in found.ranks]
    return Schedule(ranks, [samples(step) for step in found.step_samples], found.global_batch_sizes)


def plan_held_out(
    data: DataConfig,
    megatron: MegatronConfig,
    total_lengths: Sequence[int],
    rollout_ids: Sequence[int],
    dp_size: int,
    hf_config: Hf,
    *,
    together: bool,
) -> tuple[Schedule, list[int]]:
    """Returns a schedule with one step over all samples, and the number of micro-batches that count per rank.

    The micro-batches do not depend on the number of ranks. All ranks must run the same number, so a rank with fewer
    micro-batches repeats the smallest micro-batch at its end. A repeated micro-batch does not count. With `together`,
    the samples of a rollout share a micro-batch.
    """
    units = _rollouts(rollout_ids) if together else [[position] for position in range(len(rollout_ids))]
    totals = [sum(total_lengths[i] for i in unit) for unit in units]
    bins = choose_bins(data, megatron.context_parallel_size, totals)
    multiple = dp_size * micro_batch_group(megatron, len(read_decoder(hf_config).layers))
    count = -(-len(bins) // multiple) * multiple
    smallest = min(bins, key=lambda of_bin: sum(totals[unit] for unit in of_bin))
    samples = [
        [i for unit in of_bin for i in units[unit]] for of_bin in bins + [smallest] * (count - len(bins))
    ]
    ranks = [[[samples[k] for k in range(rank, count, dp_size)]] for rank in range(dp_size)]
    every = list(range(len(rollout_ids)))
    counted = [len(range(rank, len(bins), dp_size)) for rank in range(dp_size)]
    return Schedule(ranks, [every], [len(set(rollout_ids))]), counted


def _rollouts(rollout_ids: Sequence[int]) -> list[list[int]]:
    """Returns a list of sample positions for each rollout, in the order of the rollouts' first samples."""
    of_rollout: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_ids):
        of_rollout.setdefault(rollout, []).append(position)
    return list(of_rollout.values())
