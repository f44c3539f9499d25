"""The FLOPs of a rank's vision tower, by the timer of the pass that needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from slime.algo.needs import before_first_step, needs_old_log_probs
from slime.config.schema import Config
from slime.data.media.media import list_media
from slime.data.rank_data import RankData
from slime.models.decoder import Hf
from slime.models.selection import Selection
from slime.models.vision import Vision
from slime.plan.tower import run_tower, tower_flops, trained_tower_params
from slime.types import TrainData

MicroBatches = list[list[int]]


def sum_tower_work(c: Config, hf: Hf, ranks: Sequence[RankData]) -> dict[str, float]:
    """Returns the FLOPs of the vision towers of all ranks. Empty for a run without images."""
    vision = run_tower(c, hf)
    if vision is None:
        return {}
    trained = trained_tower_params(Selection.of(c), vision) > 0
    total: Counter[str] = Counter()
    for data in ranks:
        if "multimodal_train_inputs" in data:
            total.update(tower_work(data, vision, _scored(c, data), trained=trained))
    return dict(total)


def _scored(c: Config, data: RankData) -> MicroBatches:
    """Returns the micro-batches of the pass for old log-probs (`slime.megatron_backend.step.scorers.OldLogProbs`)."""
    if not needs_old_log_probs(c):
        return []
    whole = c.off_policy.use_rollout_logprobs or before_first_step(c, len(data.step_sizes))
    return data.micro_batches[0 if whole else data.step_sizes[0] :]


def tower_work(data: TrainData, vision: Vision, scored: MicroBatches, *, trained: bool) -> dict[str, float]:
    """Returns the FLOPs of a rank per timer: log_probs, ref_log_probs, actor_train. `scored` are the micro-batches of
    the pass for old log-probs, which precedes training.

    A frozen tower computes an image once per rollout, in the first pass that needs it (slime.data.media.tower_cache).
    A trained tower computes an image once per micro-batch, and its backward costs two forwards. The reference model's
    tower is frozen.
    """
    batches = data["micro_batch_indices"]
    every = _work(data, vision, [list(chain.from_iterable(batches))])
    if not trained:
        before = _work(data, vision, [list(chain.from_iterable(scored))])
        return {"log_probs": before, "ref_log_probs": every, "actor_train": every - before}
    return {
        "log_probs": _work(data, vision, scored),
        "ref_log_probs": every,
        "actor_train": 3 * _work(data, vision, batches),
    }


def _work(data: TrainData, vision: Vision, batches: MicroBatches) -> float:
    """Returns the FLOPs of a forward pass, in which a batch computes each of its images once."""
    inputs = data["multimodal_train_inputs"]
    total = 0.0
    for samples in batches:
        grids = {medium.key: medium.grid for i in samples for medium in list_media(inputs[i], vision)}
        total += tower_flops(vision, grids.values())
    return total
