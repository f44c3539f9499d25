"""GRPO (DeepSeekMath, 2402.03300, section 4.1) normalizes each reward in its group.

--use-dr-grpo is Dr.GRPO (2503.20783), which does not divide by the deviation and uses one length for all responses.
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
