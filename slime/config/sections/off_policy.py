"""Flags of the off-policy section: corrections for the difference between engine and trainer."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import BOUND


@dataclass(frozen=True)
class OffPolicyConfig:
    """Importance correction between rollout_log_probs and the trainer's log-probs."""

    use_rollout_logprobs: bool = flag(
        False, "use the engine's log-probs as old log-probs, and skip the trainer's pass for them"
    )
    use_tis: bool = flag(
        False,
        "truncated importance sampling: weight the loss of a token by trainer probability divided by engine "
        "probability, clipped",
    )
    tis_clip: float = flag(2.0, "upper bound of the importance weight", range=BOUND)
    tis_clip_low: float = flag(0.0, "lower bound of the importance weight", range=BOUND)
    custom_tis_function_path: str | None = flag(
        None,
        "fn(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)",
    )
    get_mismatch_metrics: bool = flag(False, "report the importance weights without applying them")
    use_opsm: bool = flag(
        False, "drop samples with negative advantage whose sequence KL is above --opsm-delta"
    )
    opsm_delta: float = flag(1e-4, "bound of the sequence KL for --use-opsm", range=BOUND)
    use_routing_replay: bool = flag(
        False, "train with the experts that the trainer's pass for old log-probs chose (models with experts)"
    )
    use_rollout_routing_replay: bool = flag(
        False, "train with the experts that the engine chose during sampling (models with experts)"
    )
