"""Import path of upstream vime's providers: see slime.algo.selected_log_probs."""

from slime.algo.selected_log_probs import (
    ContextParallelLayout,
    SelectedLogprobProvider,
    SelectedLogprobProviderUnavailable,
    SelectedLogprobRequest,
    SelectedLogprobResult,
    compute_selected_logprobs,
)

__all__ = [
    "ContextParallelLayout",
    "SelectedLogprobProvider",
    "SelectedLogprobProviderUnavailable",
    "SelectedLogprobRequest",
    "SelectedLogprobResult",
    "compute_selected_logprobs",
]
