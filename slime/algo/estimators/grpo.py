"""GRPO (DeepSeekMath, 2402.03300): rewards are normalized in their group, section 4.1."""

from slime.algo.estimators.record import CLIPPED, Estimator, same_for_all_tokens

GRPO = Estimator("grpo", "`A_t = r`", CLIPPED, same_for_all_tokens, group="mean and std")
