"""Flags of the off-policy section: corrections for the difference between engine and trainer."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import BOUND, COUNT_OR_ZERO


def count_ties(most: int) -> int:
    """Returns the number of ids that a kept set may have in addition to `most`, the value of --replay-kept-tokens.

    Some samplers of vLLM keep all ids whose logit equals that of the last id of top-k, and logits in bfloat16 are often
    equal. The lower the last logit, the more logits are near it, so the number grows with `most`.
    """
    return max(8, most // 4)


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
    tis_mode: str = flag(
        "truncate", "what happens to a weight outside its bounds: it is clipped to them, or 0 (mask, IcePop)"
    )
    tis_level: str = flag(
        "token",
        "what has one weight: a token, a run of trained tokens (turn), a response (sequence); geometric: the mean per "
        "token in the place of the product",
    )
    tis_clip: float = flag(2.0, "upper bound of the importance weight", range=BOUND)
    tis_clip_low: float = flag(0.0, "lower bound of the importance weight", range=BOUND)
    use_rs: bool = flag(False, "train only on tokens whose --rs-type, at --rs-level, lies within its bounds")
    rs_type: str = flag(
        "k1", "estimate of the KL between engine and trainer that --use-rs bounds; k1: as the ratio exp(-k1)"
    )
    rs_level: str = flag("token", "what --use-rs drops as a whole, as in --tis-level")
    rs_upper_bound: float = flag(None, "upper bound of --use-rs (default: --tis-clip)", range=BOUND)
    rs_lower_bound: float = flag(
        None, "lower bound of the ratio of --rs-type k1 (default: --tis-clip-low)", range=BOUND
    )
    rs_veto_threshold: float | None = flag(
        None, "--use-rs drops the whole response of a token whose ratio is below this", range=BOUND
    )
    custom_tis_function_path: str | None = flag(
        None,
        "fn(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)",
    )
    get_mismatch_metrics: bool = flag(
        False,
        "report importance weights without applying them, and rollout/mismatch_*: perplexity ratio, KL, chi-square, "
        "effective sample size",
    )
    use_opsm: bool = flag(
        False, "drop samples with negative advantage whose sequence KL is above --opsm-delta"
    )
    opsm_delta: float = flag(1e-4, "bound of the sequence KL for --use-opsm", range=BOUND)
    use_routing_replay: bool = flag(
        False, "train with the experts that the trainer's pass for old log-probs chose (models with experts)"
    )
    replay_kept_tokens: int = flag(
        0,
        "top-p, top-k: compute the policy's log-probs over the ids that the engine kept for a token, if these are at "
        "most that many (and a quarter more, at least 8, for ties); 0: over the whole vocabulary",
        range=COUNT_OR_ZERO,
    )
    use_rollout_routing_replay: bool = flag(
        False, "train with the experts that the engine chose during sampling (models with experts)"
    )

    @property
    def listed_ids(self) -> int:
        """Returns the number of likeliest ids per token that requests ask for to find the kept ids; 0: none."""
        return self.replay_kept_tokens and self.replay_kept_tokens + count_ties(self.replay_kept_tokens)
