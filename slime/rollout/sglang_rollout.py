"""The default rollout function under the path of existing slime scripts; the engine is the run's own."""

from slime.rollout.vllm_rollout import generate_rollout

__all__ = ["generate_rollout"]
