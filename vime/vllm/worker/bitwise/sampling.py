"""The log-probs that vLLM reports, by `rl_kernel.invariant`.

vLLM has no registry for its samplers. These replace functions of both on purpose: that of its older model runner, which
runs on CPUs, and that of its newer one, the default for dense models on GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

import rl_kernel.invariant as invariant
from vime.vllm.versions import replace_log_probs


def install() -> None:
    """Replace the log-softmax of sampled tokens and of prompts in this process. May run more than once."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    if hasattr(TopKTopPSampler.__init__, "wraps"):
        return
    Sampler.compute_logprobs = staticmethod(invariant.log_softmax)  # type: ignore[method-assign]
    TopKTopPSampler.__init__ = _asking_for_logits(TopKTopPSampler.__init__)  # type: ignore[method-assign]
    _install_in_newer_runner()


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


def _install_in_newer_runner() -> None:
    from vllm.v1.worker.gpu.sample import states
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    replace_log_probs(_of_tokens)
    states.apply_temperature = _divide  # type: ignore[attr-defined]  # imported there
    Sampler.apply_sampling_params = _in_float32(Sampler.apply_sampling_params)  # type: ignore[method-assign]


def _in_float32(process: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """It divides in place, and bfloat16 would round the quotient."""

    @functools.wraps(process)
    def in_float32(sampler: object, logits: Tensor, *args: object, **kwargs: object) -> Tensor:
        return process(sampler, logits.float(), *args, **kwargs)

    return in_float32


def _of_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probs of `token_ids` [N, K] by logits [N, V], fp32."""
    return invariant.target_log_probs(logits, token_ids.long())


def _divide(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """In place, each row by its request's temperature, where that is not 0. The quotient is rounded correctly, which
    vLLM's kernel does not promise."""
    of_row = temperature[expanded_idx_mapping.long()][:, None]
    logits /= of_row.where(of_row != 0, 1)
