"""Flags of the algorithm section: advantages, policy loss, KL and entropy."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import BOUND, COEFFICIENT, COUNT, COUNT_OR_ZERO, STEEPNESS, UNIT


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective of training. Formulas are in slime/algo and rl_kernel."""

    advantage_estimator: str = flag("grpo", "how advantages are computed")
    pg_loss_type: str | None = flag(
        None, "policy loss of --loss-type policy_loss (default: the one of --advantage-estimator)"
    )
    loss_type: str = flag("policy_loss", "training loss")
    custom_loss_function_path: str | None = flag(
        None, "fn(args, batch, logits, sum_of_sample_mean), for custom_loss"
    )
    custom_advantage_function_path: str | None = flag(None, "fn(args, rollout_data), in place")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> callable"
    )
    use_score_centering: bool = flag(
        False,
        "subtract from each token's score its expectation under the engine's likeliest tokens, in the policy loss "
        "reinforce, which is then the default",
    )
    score_centering_top_k: int = flag(
        128, "number of the engine's likeliest tokens of --use-score-centering", range=COUNT_OR_ZERO
    )
    eps_clip: float = flag(
        0.2,
        "lower clip range: the ratio is clipped at 1 - this; 1 or more, for --pg-loss-type cispo: no lower clip",
        range=BOUND,
    )
    eps_clip_high: float = flag(
        None, "upper clip range: the ratio is clipped at 1 + this (default: --eps-clip)", range=BOUND
    )
    eps_clip_c: float | None = flag(
        None, "dual clip for negative advantages: upper bound of the ratio, above 1", range=BOUND
    )
    sapo_tau_pos: float = flag(
        1.0, "steepness of the gate of --pg-loss-type sapo for positive advantages", range=STEEPNESS
    )
    sapo_tau_neg: float = flag(1.05, "the same for other advantages", range=STEEPNESS)
    clip_cov_ratio: float = flag(
        2e-4, "part of the tokens that --pg-loss-type clip_cov takes out of the loss", range=UNIT
    )
    clip_cov_lb: float = flag(1.0, "lower bound of the covariance of such a token", range=COEFFICIENT)
    clip_cov_ub: float = flag(5.0, "upper bound of the covariance of such a token", range=COEFFICIENT)
    kl_cov_ratio: float = flag(
        2e-3,
        "part of the tokens to which --pg-loss-type kl_cov adds a KL: those of the highest covariance (verl's "
        "scripts of 2505.22617 take 2e-3 for Qwen2.5-7B and 2e-4 for Qwen2.5-32B)",
        range=UNIT,
    )
    kl_cov_coef: float = flag(1.0, "weight of the KL of --pg-loss-type kl_cov", range=COEFFICIENT)
    pass_at_k: int | None = flag(
        None, "k of --advantage-estimator pass_at_k (default: the size of the group)", range=COUNT
    )
    kl_coef: float = flag(0.0, "weight of the KL penalty in the reward", range=COEFFICIENT)
    use_kl_loss: bool = flag(False, "report the KL to the reference model and add it to the loss")
    kl_loss_coef: float = flag(0.0, "weight of the KL in the loss", range=COEFFICIENT)
    kl_loss_type: str = flag("k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "multiply the KL estimate by exp(log_probs - old_log_probs)")
    dpo_beta: float = flag(
        0.1, "weight of the log-ratio to the reference model, for --loss-type dpo", range=COEFFICIENT
    )
    dpo_label_smoothing: float = flag(
        0.0,
        "share of the pairs that are taken as labelled the wrong way round, for --loss-type dpo",
        range=UNIT,
    )
    ref_update_interval: int | None = flag(
        None, "number of rollouts between two copies of the policy into the reference model", range=COUNT
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", range=COEFFICIENT)
    gamma: float = flag(1.0, "discount factor", range=UNIT)
    normalize_advantages: bool = flag(False, "whiten the advantages over all data parallel ranks")
    disable_grpo_std_normalization: bool = flag(
        False, "do not divide the advantages of a group by their standard deviation"
    )
    disable_rewards_normalization: bool = flag(
        False, "use the rewards as advantages, without normalization in the group"
    )
    use_dr_grpo: bool = flag(
        False,
        "Dr.GRPO: no division by the standard deviation, and each response divided by --dr-grpo-length instead of its "
        "own length",
    )
    dr_grpo_length: int | None = flag(
        None, "constant length of --use-dr-grpo (default: --rollout-max-response-len)", range=COUNT
    )
    calculate_per_token_loss: bool = flag(False, "average the loss over all tokens instead of over samples")
    disable_compute_advantages_and_returns: bool = flag(
        False, "compute no advantages (for supervised training and custom losses)"
    )
    enable_mtp_training: bool = flag(
        False, "train the model's layers of multi-token prediction, which engines draft with"
    )
    mtp_loss_scaling_factor: float = flag(
        0.2, "weight of the loss of --enable-mtp-training", range=COEFFICIENT
    )

    @property
    def centred_ids(self) -> int:
        """Returns the number of the engine's likeliest tokens that the loss reads."""
        return self.score_centering_top_k if self.use_score_centering else 0
