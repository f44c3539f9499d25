"""Computes the sampling parameters of drafted tokens, for engines on CPUs.

To check a draft, vLLM repeats each request's temperature, top-k and top-p for every drafted token. vLLM's function for
CPUs writes them into a copy of another dtype and drops the copy. The sampler then reads uninitialised memory, and the
log-probs are wrong, often NaN. Our function writes into vLLM's own tensor.
"""

from __future__ import annotations

import torch


def register() -> None:
    """Registers our function with vLLM, which then calls our function instead of vLLM's. Repeated calls are allowed."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:  # vLLM uses its Triton kernel
        return
    try:
        from vllm.triton_utils.dispatcher import register_kernels
    except ImportError:  # older versions have neither such a registry nor drafts on CPUs
        return
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Computes `output[:] = where(x == replace_from, replace_to, x).repeat_interleave(counts)`, with `counts` the
    differences of `cu_num_tokens`.

    output [N] and input_val [requests] may have any dtype. vLLM passes the arguments by name, so the names are vLLM's.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts))
