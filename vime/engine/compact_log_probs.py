"""Log-probs of sampled tokens as numbers alone, for requests that say so; every other request gets what vLLM gives.

vLLM's server spells each log-prob out: it decodes the token with those around it, keeps an object a position, and
writes four columns into the answer. All of that happens in the one process that speaks HTTP, and as the responses of a
rollout end together, the GPU waits for it (docs/design/decisions.md has the figures). We read ids and floats. So two
places of vLLM are wrapped in our servers' processes: where a request's log-probs are collected, and where a completion
is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUEST: dict[str, Any] = {"logprobs": 0, "vllm_xargs": {"vime_compact_log_probs": 1}}
"""What a /v1/completions body says: choices[0].logprobs then holds `token_logprobs`, and its other lists are empty."""
LOWEST = -9999.0
"""What vLLM writes for minus infinity, which JSON does not have."""
NOT_A_NUMBER = 9999.0
"""What we write for NaN. A log-prob is never positive."""


def install() -> None:
    """Wrap both places in this process. May run more than once."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.logprobs import LogprobsProcessor

    if not hasattr(LogprobsProcessor.from_new_request, "wraps"):
        collect = _collecting(LogprobsProcessor.from_new_request)
        LogprobsProcessor.from_new_request = staticmethod(collect)  # type: ignore[method-assign]
        write = _writing(OpenAIServingCompletion._create_completion_logprobs)
        OpenAIServingCompletion._create_completion_logprobs = write  # type: ignore[method-assign]


def _asks(sampling_params: Any) -> bool:
    (name,) = REQUEST["vllm_xargs"]
    return sampling_params.logprobs == REQUEST["logprobs"] and name in (sampling_params.extra_args or {})


def _collecting(vllms: Callable[..., Any]) -> Callable[..., Any]:
    def from_new_request(tokenizer: Any, request: Any) -> Any:
        if _asks(request.sampling_params):
            request.sampling_params.flat_logprobs = (
                True  # lists of numbers; HTTP has no other way to ask for them
            )
            return vllms(tokenizer=None, request=request)
        return vllms(tokenizer=tokenizer, request=request)

    from_new_request.wraps = vllms  # type: ignore[attr-defined]
    return from_new_request


def _writing(vllms: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
    from vllm.logprobs import FlatLogprobs

    def create_completion_logprobs(self: Any, *, top_logprobs: Any, **others: Any) -> Any:
        if isinstance(top_logprobs, FlatLogprobs):  # one entry a position: that of the sampled token
            values = top_logprobs.logprobs
            return CompletionLogProbs(
                token_logprobs=[NOT_A_NUMBER if value != value else max(value, LOWEST) for value in values]
            )
        return vllms(self, top_logprobs=top_logprobs, **others)

    return create_completion_logprobs
