"""GSPO (2507.18071): GRPO with one ratio per sequence, from the masked mean of its log-prob differences."""

from slime.algo.estimators.record import CLIPPED, Estimator, same_for_all_tokens

GSPO = Estimator(
    "gspo",
    "`A_t = r`",
    CLIPPED,
    same_for_all_tokens,
    ratio="sequence",
    group="mean and std",
    reads=frozenset({"old_log_probs"}),
)
