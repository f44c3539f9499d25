"""Import path of slime plug-ins: see slime.megatron_backend.step.custom_loss and slime.algo.corrections."""

from slime.algo.corrections import icepop_function, vanilla_tis_function
from slime.megatron_backend.step.custom_loss import (
    compute_advantages_and_returns,
    get_log_probs_and_entropy,
    get_responses,
    policy_loss_function,
)
from slime.system.upstream import refused_names

__all__ = [
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_responses",
    "icepop_function",
    "policy_loss_function",
    "vanilla_tis_function",
]
__getattr__ = refused_names("slime.backends.megatron_utils.loss")
