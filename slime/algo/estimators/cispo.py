"""CISPO (2506.13585) is GRPO with the clipped ratio as a constant weight of the log-prob."""

from slime.algo.estimators.record import Estimator, same_for_all_tokens
from slime.algo.surrogates import CISPO_LOSS

CISPO = Estimator(
    "cispo", "`A_t = r`", CISPO_LOSS, same_for_all_tokens, group="mean and std", source="2506.13585"
)
