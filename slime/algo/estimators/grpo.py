"""GRPO (DeepSeekMath, 2402.03300): rewards are normalized in their group, section 4.1.

Dr.GRPO (2503.20783) is --use-dr-grpo: no division by the deviation, and one length for all responses.
"""

from slime.algo.estimators.record import Estimator, same_for_all_tokens
from slime.algo.surrogates import CLIPPED

GRPO = Estimator(
    "grpo",
    "`A_t = r`",
    CLIPPED,
    same_for_all_tokens,
    group="mean and std",
    source="2402.03300",
    aliases=("grpo_vectorized", "group_norm"),
    example="examples/dapo",
)
