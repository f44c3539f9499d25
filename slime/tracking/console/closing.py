"""Formats the last lines of a run: the best evaluation, the folder of the weights, and the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime.algo.losses import held_out
from slime.checkpoints.checkpoint_dir import iteration_path
from slime.config import Config
from slime.tracking.metrics import is_held_out_loss

_DATASETS = 4
"""Number of evaluation sets that are listed."""


def closing(
    c: Config, evaluations: Mapping[int, Mapping[str, float]], saved: int | None
) -> Iterator[tuple[str, str]]:
    """Yields (title, text) per line.

    `evaluations` has scores by the number of trained rollouts. `saved` is the rollout of the newest checkpoint of this
    run.
    """
    names = list(dict.fromkeys(name for scores in evaluations.values() for name in scores))
    for name in names[:_DATASETS]:
        found = {count: scores[name] for count, scores in evaluations.items() if name in scores}
        scores = {count: score for count, score in found.items() if math.isfinite(score)}
        if not scores:
            continue
        sign = -1 if held_out(c) and is_held_out_loss(name) else 1
        best = max(scores, key=lambda count: (sign * scores[count], -count))
        if len(scores) > 1 and len(set(scores.values())) == 1:
            yield "best evaluation", f"{name} {scores[best]:.4g}, equal in all {len(scores)} evaluations"
            continue
        text = f"{name} {scores[best]:.4g} after {best} rollouts"
        if best != (last := max(scores)):
            text += f" (after {last}: {scores[last]:.4g})"
        if (kept := _find_checkpoint(c, best)) is not None and best - 1 != saved:
            text += f"; its weights: {kept}"
        yield "best evaluation", text
    if c.debug.debug_rollout_only:
        yield "next", shlex.join(["vime", "ui", c.logging.run_dir])
        return
    locations = []
    if saved is not None and c.checkpoint.save is not None:
        locations.append(str(iteration_path(Path(c.checkpoint.save), saved)))
        if c.checkpoint.save_hf is not None:
            locations.append(c.checkpoint.save_hf.format(rollout_id=saved))
    missing = "not saved; --save DIR saves them" if c.checkpoint.save is None else "this run saved none"
    yield "weights", " and ".join(locations) or missing
    exported = saved is not None and c.checkpoint.save is not None and c.checkpoint.save_hf is None
    if exported and c.checkpoint.save is not None:
        save = c.checkpoint.save
        yield (
            "next",
            shlex.join(
                [
                    *("vime", "export", "--load", save, "--hf-checkpoint", c.rollout.hf_checkpoint),
                    *("--output-dir", f"{save.rstrip('/')}-hf"),
                ]
            ),
        )
    else:
        yield "next", shlex.join(["vime", "ui", c.logging.run_dir])


def _find_checkpoint(c: Config, count: int) -> Path | None:
    """Returns the folder of the checkpoint after `count` rollouts, if the folder exists."""
    if c.checkpoint.save is None or count < 1:
        return None
    folder = iteration_path(Path(c.checkpoint.save), count - 1)
    return folder if folder.is_dir() else None
