"""Import path of existing slime scripts for the default rollout function. The run's own engine generates."""

from slime.rollout.vllm_rollout import generate_rollout

__all__ = ["generate_rollout"]
