"""Packs the micro-batches of a rank for a pass, and counts the micro-batches of a rollout that training has taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slime.config import Config
from slime.data import columns
from slime.data.media.tower_cache import TowerCache
from slime.data.packing import MicroBatch, pack
from slime.data.rank_data import RankData
from slime.data.sharing.prompts import shares_prompts
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.routing_replay import Replay
from slime.models import read_decoder
from slime.tracking.timers import Timers


class Batches:
    """The micro-batches of a trainer rank. `progress`: micro-batches that training has taken, and their total in the
    rollout. `towers`: the outputs of frozen vision towers for the images of the rollout."""

    def __init__(
        self,
        config: Config,
        hf_config: dict[str, Any],
        info: ParallelInfo,
        replay: Replay,
        timers: Timers,
    ) -> None:
        self._config, self._info, self._timers = config, info, timers
        self._replay = replay
        self._share_prompts = shares_prompts(config, hf_config)
        self._vision = read_decoder(hf_config).vision
        self.towers = TowerCache()
        self.begin(0)

    def pack(self, data: RankData, samples: list[int], *, training: bool, policy: bool = True) -> MicroBatch:
        """Returns a micro-batch for training or for log-probs. `policy` means that the micro-batch is for the policy,
        which may replay experts. Another model chooses its own experts."""
        carried = columns.carried(data, self._config, training=training, policy=policy)
        batch = self._packed(data, samples, carried)
        if policy:
            self._replay.attach(batch, training=training)
        return batch

    def pack_pass(
        self, data: RankData, micro_batches: list[list[int]], *, policy: bool
    ) -> Iterator[MicroBatch]:
        """Returns the packed micro-batches of a pass without gradient."""
        return (self.pack(data, samples, training=False, policy=policy) for samples in micro_batches)

    def pack_training(
        self, data: RankData, micro_batches: list[list[int]], columns: Sequence[str] | None = None
    ) -> Iterator[MicroBatch]:
        """Yields the packed micro-batches of an optimizer step: of the policy, or of another model that reads
        `columns`."""
        for k, samples in enumerate(micro_batches):
            self.progress = (self._finished + k, self._total)
            with self._timers.measure("pack"):
                if columns is None:
                    batch = self.pack(data, samples, training=True)
                else:
                    batch = self._packed(data, samples, columns)
            yield batch

    def pack_evaluation(self, data: RankData) -> Iterator[MicroBatch]:
        """Returns all packed micro-batches of a held-out set, with the columns of training."""
        carried = columns.carried(data, self._config, training=True, policy=True)
        return (self._packed(data, samples, carried) for samples in data.micro_batches)

    def begin(self, total: int) -> None:
        """Starts counting the training of a rollout with `total` micro-batches."""
        self._finished, self._total = 0, total
        self.progress = (0, total)

    def finish(self, count: int) -> None:
        """Counts a finished step of `count` micro-batches."""
        self._finished += count
        self.progress = (self._finished, self._total)

    def _packed(self, data: RankData, samples: list[int], carried: Sequence[str]) -> MicroBatch:
        info = self._info
        return pack(
            data,
            samples,
            carried,
            device=info.device,
            # sequence parallelism cuts the packed row into equal parts
            multiple=info.tp_size if self._config.megatron.sequence_parallel else 1,
            cp_rank=info.cp_rank,
            cp_size=info.cp_size,
            share_prompts=self._share_prompts,
            vision=self._vision,
            has_tower=info.pp_rank == 0,
            cache=self.towers,
        )
