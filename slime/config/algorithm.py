"""Flags of the algorithm section: advantages, policy loss, KL and entropy."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
CENTRED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""Estimators whose reward is centred on its group (DeepSeekMath 2402.03300 section 4.1; REINFORCE++ 2501.03262)."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective. Formulas are in slime/algo and rl_kernel."""

    advantage_estimator: str = flag("grpo", "how advantages are computed", choices=ESTIMATORS)
    loss_type: str = flag("policy_loss", "training loss", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = flag(
        None, "fn(args, batch, logits, sum_of_sample_mean), for custom_loss"
    )
    custom_advantage_function_path: str | None = flag(None, "fn(args, rollout_data), in place")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> callable"
    )
    eps_clip: float = flag(0.2, "lower clip range of the ratio")
    eps_clip_high: float | None = flag(None, "upper clip range of the ratio (default: --eps-clip)")
    eps_clip_c: float | None = flag(None, "dual-clip bound, above 1, for negative advantages")
    kl_coef: float = flag(0.0, "KL penalty inside the reward")
    use_kl_loss: bool = flag(False, "report the KL to the reference model and add it to the loss")
    kl_loss_coef: float = flag(0.0, "weight of the KL in the loss")
    kl_loss_type: str = flag("k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "weight the KL estimate by exp(log_probs - old_log_probs)")
    ref_update_interval: int | None = flag(
        None, "copy the policy into the reference model every so many rollouts"
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    gamma: float = flag(1.0, "discount")
    normalize_advantages: bool = flag(False, "whiten advantages over the data-parallel group")
    disable_grpo_std_normalization: bool = flag(False, "do not divide group advantages by their std")
    disable_rewards_normalization: bool = flag(False, "use raw rewards as advantages")
    calculate_per_token_loss: bool = flag(False, "mean over all tokens instead of over samples")
    disable_compute_advantages_and_returns: bool = flag(False, "no advantages (SFT and custom losses)")
