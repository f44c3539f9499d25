"""The policy: the model that engines serve and that the run trains."""

from __future__ import annotations

from slime.checkpoints.checkpoint_dir import resumed_iteration, start_directory, start_iteration
from slime.config import Config
from slime.roles.record import Role, Source


def _start(c: Config) -> Source:
    return Source(start_directory(c), start_iteration(c), "--load")


def _resumed(c: Config) -> Source | None:
    iteration = resumed_iteration(c)
    if c.checkpoint.load is None or iteration is None:
        return None
    return Source(c.checkpoint.load, iteration, "--load")


def _saves_to(c: Config) -> str | None:
    return c.checkpoint.save


POLICY = Role("policy", "old_log_probs", "log_probs", _start, _resumed, _saves_to, trained=True)
