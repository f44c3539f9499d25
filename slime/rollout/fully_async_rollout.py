"""Import path of slime scripts for rollouts that overlap training.

`train_async.py` and `--max-staleness` make the default rollout function generate without end, so that this one is the
same.
"""

from slime.rollout.vllm_rollout import generate_rollout
from slime.rollout.vllm_rollout import generate_rollout as generate_rollout_fully_async

__all__ = ["generate_rollout", "generate_rollout_fully_async"]
