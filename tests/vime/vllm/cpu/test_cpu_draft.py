"""Tests the sampling parameters of drafted tokens on CPUs. e2e/test_engine_draft.py tests their log-probs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from vllm.platforms import current_platform

from vime.vllm.cpu import draft as cpu_draft


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_repeats_into_the_output(dtype: torch.dtype) -> None:
    """The requests have two, no, one and three drafted tokens; a greedy request has the temperature 0."""
    output = torch.full((6,), -7, dtype=dtype)
    values = torch.tensor([3, 5, 0, 2], dtype=dtype)
    counts = torch.tensor([2, 2, 3, 6], dtype=torch.int32)
    cpu_draft.expand(output, values, counts, 0, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [3, 3, 1, 2, 2, 2]
    assert values.tolist() == [3, 5, 0, 2]


def test_keeps_fractions() -> None:
    """Temperature and top-p are not integers, although vLLM's CPU function treats them as such."""
    output = torch.empty(3)
    cpu_draft.expand(output, torch.tensor([0.7, 0.95]), torch.tensor([1, 3]), 0, 0)
    assert torch.equal(output, torch.tensor([0.7, 0.95, 0.95]))


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM is built for GPUs")
@pytest.mark.skipif(find_spec("vllm.triton_utils.dispatcher") is None, reason="this vLLM drafts on GPUs only")
def test_vllm_registers_this_form() -> None:
    """A worker reads the function from here when it starts, with the names of vLLM's own arguments."""
    from vllm.triton_utils import dispatcher

    current_platform.register_triton_kernel_overrides()
    cpu_draft.register()
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    assert dispatcher._registry["vllm.v1.sample.rejection_sampler.expand_kernel"][1] is cpu_draft.expand
    counts = torch.tensor([1, 3], dtype=torch.int32)
    repeated = expand_batch_to_tokens(torch.tensor([0.0, 0.5]), counts, 3, 0, 1)
    assert repeated.tolist() == [1.0, 0.5, 0.5]
