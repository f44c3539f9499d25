"""After which rollouts something is due."""

from __future__ import annotations

from slime.config import Config


def due(interval: int | None, count: int) -> bool:
    """Whether something that happens every `interval` rollouts (None: never) is due after `count` rollouts."""
    return interval is not None and count % interval == 0


def saves_after(config: Config, rollout_id: int) -> bool:
    """Whether a checkpoint follows rollout `rollout_id`: every --save-interval rollouts and after the last one."""
    if config.checkpoint.save is None:
        return False
    return due(config.checkpoint.save_interval, rollout_id + 1) or rollout_id + 1 == config.data.num_rollout
