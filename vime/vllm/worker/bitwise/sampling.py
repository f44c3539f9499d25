"""The log-probs that vLLM reports, by `rl_kernel.invariant.log_softmax`.

vLLM has no registry for its sampler. These replace methods of it on purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

import rl_kernel.invariant as invariant


def install() -> None:
    """Replace vLLM's log-softmax of sampled tokens and of prompts in this process. May run more than once."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    if hasattr(TopKTopPSampler.__init__, "wraps"):
        return
    Sampler.compute_logprobs = staticmethod(invariant.log_softmax)  # type: ignore[method-assign]
    TopKTopPSampler.__init__ = _asking_for_logits(TopKTopPSampler.__init__)  # type: ignore[method-assign]


def _asking_for_logits(init: Callable[..., None]) -> Callable[..., None]:
    """The sampler returns the logits that it sampled from, and we make log-probs of them."""

    @functools.wraps(init)
    def __init__(self: Any, logprobs_mode: str = "raw_logprobs", *args: Any, **kwargs: Any) -> None:
        asked = logprobs_mode == "processed_logprobs"
        init(self, "processed_logits" if asked else logprobs_mode, *args, **kwargs)
        if not asked:
            return
        sample = self.forward

        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            tokens, logits = sample(*args, **kwargs)
            return tokens, None if logits is None else invariant.log_softmax(logits)

        self.forward = forward

    __init__.wraps = init  # type: ignore[attr-defined]
    return __init__
