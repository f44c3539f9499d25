"""Log-probs of sampled tokens as numbers alone, for requests for a group of samples (see group_route).

Beside each log-prob, vLLM decodes the token with those around it, in the one process that speaks HTTP. As the responses
of a rollout end together, the GPU waits for it (docs/design/decisions.md has the figures). We read ids and floats, so
the function of vLLM that collects a request's log-probs is wrapped in our servers' processes: it gets no tokenizer for
requests with `flat_logprobs`, which HTTP cannot ask vLLM for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.logprobs import LogprobsProcessor


def install() -> None:
    """Wrap that place in this process. May run more than once."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    if not hasattr(LogprobsProcessor.from_new_request, "wraps"):
        collect = _collecting(LogprobsProcessor.from_new_request)
        LogprobsProcessor.from_new_request = staticmethod(collect)  # type: ignore[method-assign]


def _collecting(vllms: Callable[..., LogprobsProcessor]) -> Callable[..., LogprobsProcessor]:
    def from_new_request(tokenizer: TokenizerLike | None, request: EngineCoreRequest) -> LogprobsProcessor:
        assert request.sampling_params is not None
        spelled = not request.sampling_params.flat_logprobs
        return vllms(tokenizer=tokenizer if spelled else None, request=request)

    from_new_request.wraps = vllms  # type: ignore[attr-defined]
    return from_new_request
