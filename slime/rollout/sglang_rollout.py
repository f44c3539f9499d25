"""Import path of existing slime scripts and plug-ins. The run's own engine generates."""

from slime.rollout.generate import generate, generate_and_rm, generate_and_rm_group
from slime.rollout.vllm_rollout import generate_rollout

__all__ = ["generate", "generate_and_rm", "generate_and_rm_group", "generate_rollout"]
