"""Collects log-probs of sampled tokens as numbers without text, for requests for a group of samples (see group_route).

vLLM decodes each token to text with its log-prob, in the single process that serves HTTP. The responses of a rollout
end at the same time, so the GPU waits for this work (docs/design/decisions.md has the figures). Our client needs ids
and floats only. In our servers, the function of vLLM that collects the log-probs of a request is therefore replaced
(vime.vllm.patches). It gets no tokenizer for requests with `flat_logprobs`, a parameter that vLLM's HTTP routes do not
have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.logprobs import LogprobsProcessor


def without_text(vllms: Callable[..., LogprobsProcessor]) -> Callable[..., LogprobsProcessor]:
    """Wraps vLLM's `from_new_request` so that it gets no tokenizer for requests with `flat_logprobs`."""

    def from_new_request(
        cls: type[LogprobsProcessor], tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        assert request.sampling_params is not None
        spelled = not request.sampling_params.flat_logprobs
        return vllms(cls, tokenizer=tokenizer if spelled else None, request=request)

    return from_new_request
