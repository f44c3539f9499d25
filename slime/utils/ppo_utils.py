"""Import path of slime plug-ins: see slime.algo.ppo and slime.plug_ins.sequences."""

from slime.algo.ppo import (
    calculate_log_probs_and_entropy,
    chunked_discounted_returns,
    chunked_gae,
    compute_approx_kl,
    compute_entropy_from_logits,
    compute_log_probs,
    get_reinforce_plus_plus_returns,
    vanilla_gae,
)
from slime.algo.surrogates import compute_cispo_loss, compute_policy_loss
from slime.plug_ins.sequences import compute_gspo_kl, compute_opsm_mask, get_grpo_returns

__all__ = [
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_entropy_from_logits",
    "compute_gspo_kl",
    "compute_log_probs",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_grpo_returns",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]
