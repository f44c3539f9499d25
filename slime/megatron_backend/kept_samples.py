"""Records of a trainer rank about the samples that a run keeps for people (--save-samples): advantages and
log-probs."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from slime.algo.needs import drops_inputs
from slime.config import Config
from slime.data.packing import MicroBatch
from slime.megatron_backend.parallel import ParallelInfo
from slime.tracking.run_files import Line
from slime.tracking.samples import MOST_TOKENS, write_trained
from slime.types import TrainData


class SampleRecorder:
    """Collects the records; one object per trainer rank. Call `add` for the micro-batches for which `wants` is True,
    and `write` after the training.

    The log-probs belong to the policy before the rollout's updates. They come from an extra pass if there is one,
    otherwise from the first optimizer step, unless it draws dropout. In the second case, samples of later steps have no
    log-probs.
    """

    def __init__(self, config: Config, info: ParallelInfo) -> None:
        self._config, self._info = config, info
        self._reads_steps = not drops_inputs(config)
        self._found: dict[int, Tensor] = {}

    def wants(self, data: TrainData, step_id: int) -> bool:
        return self._reads_steps and step_id == 0 and "log_probs" not in data and any(data.get("kept", ()))

    def add(self, data: TrainData, batch: MicroBatch, log_probs: Tensor) -> None:
        """Adds the detached log-probs [R] of a micro-batch."""
        parts = batch.split(log_probs, data["response_lengths"])
        found = zip(batch.samples, parts, strict=True)
        self._found |= {i: part.clone() for i, part in found if data["kept"][i]}

    def write(self, rollout_id: int, data: TrainData) -> None:
        """Writes the records on one of the ranks that have the same samples."""
        found, self._found = self._found, {}
        info = self._info
        if info.tp_rank or info.cp_rank or not info.last_stage:
            return
        name = "log_probs" if "log_probs" in data else "old_log_probs"
        of_engine = name == "old_log_probs" and self._config.off_policy.use_rollout_logprobs
        if name in data and not of_engine:
            found = dict(enumerate(data[name]))
        kept = [i for i, is_kept in enumerate(data.get("kept", ())) if is_kept]
        if kept:
            lines = [_line(data, i, found.get(i)) for i in kept]
            write_trained(Path(self._config.logging.run_dir), rollout_id, info.rank, lines)


def _line(data: TrainData, i: int, log_probs: Tensor | None) -> Line:
    advantage = None
    if "advantages" in data:
        mask = data["loss_masks"][i]
        values = data["advantages"][i].to(mask.device)
        advantage = round(float((values * mask).sum() / mask.sum().clamp(min=1)), 6)
    values = None if log_probs is None else [round(x, 6) for x in log_probs[:MOST_TOKENS].float().tolist()]
    return {"place": data["partition"][i], "advantage": advantage, "log_probs": values}
