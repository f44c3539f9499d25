"""GSPO (2507.18071) is GRPO with one ratio per sequence, from the masked mean of the log-prob differences."""

from slime.algo.estimators.record import Estimator, same_for_all_tokens
from slime.algo.surrogates import GSPO_LOSS

GSPO = Estimator(
    "gspo", "`A_t = r`", GSPO_LOSS, same_for_all_tokens, group="mean and std", source="2507.18071"
)
