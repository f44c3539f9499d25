"""Import path of slime plug-ins: see slime.algo.ppo."""

from slime.algo.ppo import (
    calculate_log_probs_and_entropy,
    chunked_discounted_returns,
    chunked_gae,
    compute_approx_kl,
    get_reinforce_plus_plus_returns,
    vanilla_gae,
)
from slime.algo.surrogates import compute_cispo_loss, compute_policy_loss

__all__ = [
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_policy_loss",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]
