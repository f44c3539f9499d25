"""Computes the log-probs that vLLM reports with `rl_kernel.invariant`.

vLLM has no registry for its samplers. The older model runner, which runs on CPUs, has a sampler whose methods this file
replaces. The newer one, the default for dense models on GPUs, calls functions of its modules, which `vime.vllm.patches`
replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

import rl_kernel.invariant as invariant


def use_log_probs(runner: object) -> None:
    """Makes the sampler of an older model `runner` of vLLM compute log-probs with our log-softmax. The sampler of a
    newer runner does not change."""
    sampler: Any = getattr(runner, "sampler", None)
    top = getattr(sampler, "topk_topp_sampler", None)
    if top is None:
        return
    sampler.compute_logprobs = invariant.log_softmax
    if top.logprobs_mode != "processed_logprobs":
        return
    top.logprobs_mode = "processed_logits"
    sample = top.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Computes log-probs from the logits that the sampler sampled from."""
        tokens, logits = sample(*args, **kwargs)
        return tokens, None if logits is None else invariant.log_softmax(logits)

    top.forward = forward


def in_float32(process: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps vLLM's `apply_sampling_params` to work in float32. vLLM divides in place, and bfloat16 would round the
    quotient."""

    @functools.wraps(process)
    def process_float32(sampler: object, logits: Tensor, *args: object, **kwargs: object) -> Tensor:
        return process(sampler, logits.float(), *args, **kwargs)

    return process_float32


def target_log_probs(_: object) -> Callable[[Tensor, Tensor], Tensor]:
    """Replaces vLLM's `compute_token_logprobs`: (logits [N, V], token ids [N, K]) -> log-probs [N, K] fp32."""
    return lambda logits, token_ids: invariant.target_log_probs(logits, token_ids.long())


def exact_temperature(_: object) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Replaces vLLM's `apply_temperature`. Rounds the quotient correctly, which vLLM's kernel does not guarantee."""

    def divide(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
        """Divides each row of logits in place by its request's temperature, unless the temperature is 0."""
        by_row = temperature[expanded_idx_mapping.long()][:, None]
        logits /= by_row.where(by_row != 0, 1)

    return divide
