"""Tests a model served at a temperature: vLLM's own layer, without an engine. The example's teacher is a real
engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vime.vllm.worker.workers import divide_logits


def test_logits_are_divided_after_the_soft_cap() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    raw = torch.tensor([[3.0, -7.0, 0.5]])
    with set_current_vllm_config(VllmConfig()):
        plain = LogitsProcessor(3, logits_as_input=True)
        capped = LogitsProcessor(3, scale=0.5, soft_cap=5.0, logits_as_input=True)
    divide_logits(nn.ModuleList([plain, capped]), 0.7)
    torch.testing.assert_close(plain(None, raw.clone()), raw / 0.7)
    torch.testing.assert_close(capped(None, raw.clone()), 5 * (raw / 5).tanh() * 0.5 / 0.7)


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="must have logits to be served at temperature 0.7, got Linear"):
        divide_logits(nn.Linear(2, 2), 0.7)
