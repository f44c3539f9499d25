"""The old log-probs of a rollout with several optimizer steps, whose first step computes those of its own samples.

    extra pass over the samples of later steps -> expect -> [first step] -> add -> complete -> data["old_log_probs"]

The first step trains the old policy, so that its log-probs, detached, are the old ones.
"""

from __future__ import annotations

from torch import Tensor

from slime.data.packing import MicroBatch
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.pipeline import tensors_from_last_stage
from slime.types import TrainData


def later_micro_batches(data: TrainData) -> list[list[int]]:
    """The micro-batches after those of the first optimizer step."""
    later: list[list[int]] = data["micro_batch_indices"][data["num_microbatches"][0] :]
    return later


class OldLogProbs:
    """One per trainer rank. Without `expect`, a rollout has no use for it."""

    def __init__(self, info: ParallelInfo) -> None:
        self._info = info
        self._later: dict[int, Tensor] = {}
        self._first: dict[int, Tensor] = {}

    def expect(self, later: dict[int, Tensor]) -> None:
        """Wait for the first step's log-probs. `later`: log-probs by sample of the later steps."""
        self._later, self._first = later, {}

    @property
    def known(self) -> TrainData:
        """The log-probs that `expect` got, as a column of some samples."""
        return {"old_log_probs": list(self._later.values())} if self._later else {}

    def wants(self, step_id: int) -> bool:
        return step_id == 0 and bool(self._later)

    def add(self, data: TrainData, batch: MicroBatch, log_probs: Tensor) -> None:
        """Add the detached log-probs [R] of a micro-batch of the first step."""
        parts = batch.split(log_probs, data["response_lengths"])
        self._first |= zip(batch.samples, parts, strict=True)

    def complete(self, data: TrainData) -> None:
        """After the first step: add the columns `old_log_probs` and `log_probs` for all samples. Collective over the
        stages of a pipeline."""
        lengths = {i: n for i, n in enumerate(data["response_lengths"]) if i not in self._later}
        found = self._later | tensors_from_last_stage(self._info, self._first, lengths)
        data["old_log_probs"] = data["log_probs"] = [found[i] for i in range(len(data["response_lengths"]))]
        self.expect({})
