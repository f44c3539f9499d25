"""The reference model, to which a KL keeps the policy close."""

from __future__ import annotations

from slime.config import Config
from slime.config.problems import given
from slime.roles.record import Role, Source


def _start(c: Config) -> Source:
    directory = c.checkpoint.ref_load or given(c.rollout.hf_checkpoint)
    return Source(directory, c.checkpoint.ref_ckpt_step, "--ref-load")


REFERENCE = Role("reference", "ref_log_probs", "ref_log_probs", _start, prefix="ref_")
