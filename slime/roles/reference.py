"""The reference model. A KL term keeps the policy close to it."""

from __future__ import annotations

from slime.config import Config
from slime.config.problems import require_value
from slime.roles.policy import POLICY
from slime.roles.record import Role, Source


def _start(c: Config) -> Source:
    directory = c.checkpoint.ref_load or require_value(c.rollout.hf_checkpoint)
    return Source(directory, c.checkpoint.ref_ckpt_step, "--ref-load")


def _shares_base(c: Config) -> bool:
    """Returns True with adapters if the reference and the policy's base load the same weights."""
    return bool(c.lora.lora_rank) and _start(c).shares_weights(POLICY.source(c))


REFERENCE = Role("reference", "ref_log_probs", "ref_log_probs", _start, prefix="ref_", of_base=_shares_base)
