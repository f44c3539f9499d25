"""What a configuration's loss and estimator need of the trainer. Must start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algo.estimators import estimator_of
from slime.algo.losses import loss_of

if TYPE_CHECKING:
    from slime.config.schema import Config


def needs_reference(c: Config) -> bool:
    """Whether a reference model is loaded and its log-probs are computed. Supervised training needs none."""
    if not loss_of(c.algorithm).rewarded:
        return False
    return estimator_of(c.algorithm).needs_reference or c.algorithm.use_kl_loss or c.algorithm.kl_coef != 0
