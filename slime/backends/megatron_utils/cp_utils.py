"""Import path of slime plug-ins: see slime.megatron_backend.step.context_parallel."""

from slime.megatron_backend.step.context_parallel import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    slice_log_prob_with_cp,
    slice_with_cp,
)
from slime.system.upstream import refused_names

__all__ = [
    "all_gather_with_cp",
    "get_logits_and_tokens_offset_with_cp",
    "get_sum_of_sample_mean",
    "slice_log_prob_with_cp",
    "slice_with_cp",
]
__getattr__ = refused_names("slime.backends.megatron_utils.cp_utils")
