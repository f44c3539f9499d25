"""Flags of the off-policy section: correcting for the gap between engine and trainer."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag


@dataclass(frozen=True)
class OffPolicyConfig:
    """Importance correction between rollout_log_probs and the trainer's own."""

    use_rollout_logprobs: bool = flag(
        False, "take the engine's log-probs as the old policy; no recompute pass"
    )
    use_tis: bool = flag(False, "truncated importance sampling")
    tis_clip: float = flag(2.0, "upper bound of the importance weight")
    tis_clip_low: float = flag(0.0, "lower bound of the importance weight")
    custom_tis_function_path: str | None = flag(
        None,
        "fn(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)",
    )
    get_mismatch_metrics: bool = flag(False, "report importance-weight metrics without applying them")
    use_opsm: bool = flag(False, "drop negative samples whose sequence KL exceeds --opsm-delta")
    opsm_delta: float = flag(1e-4, "threshold of --use-opsm")
