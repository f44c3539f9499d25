"""Import path of slime scripts for rollouts that overlap training.

`train_async.py` and `--max-staleness` make rollouts overlap training with the default rollout function, so that this
one is the same. `--partial-rollout` continues what a full batch has cut off.
"""

from slime.rollout.vllm_rollout import generate_rollout
from slime.rollout.vllm_rollout import generate_rollout as generate_rollout_fully_async

__all__ = ["generate_rollout", "generate_rollout_fully_async"]
