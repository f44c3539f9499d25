"""Tests a model served at a temperature: vLLM's own layer, without an engine. The example's teacher is a real
engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vime.vllm.worker import workers
from vime.vllm.worker.workers import choose_delta_kernel, divide_logits


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


@pytest.mark.parametrize(
    ("given", "installed", "kernel"),
    [
        ({}, False, "triton"),
        ({"own": 1, "gdn_prefill_backend": "auto"}, False, "triton"),
        ({"gdn_prefill_backend": "flashinfer"}, False, "flashinfer"),
        ({}, True, "flashinfer"),
    ],
)
def test_delta_nets_do_without_flashinfer(
    given: dict[str, Any],
    installed: bool,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM's own function chooses the kernel, on a platform that answers as an H100 does."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    hopper = SimpleNamespace(
        is_cuda=lambda: True, is_rocm=lambda: False, is_device_capability=lambda number: number == 90
    )
    monkeypatch.setattr(layers, "current_platform", hopper)
    monkeypatch.setattr(workers, "has_flashinfer", lambda: installed)
    text = SimpleNamespace(linear_key_head_dim=128, linear_value_head_dim=128)
    config: Any = SimpleNamespace(
        additional_config=dict(given), model_config=SimpleNamespace(hf_text_config=text)
    )
    assert layers._resolve_gdn_prefill_backend(config)[1] == "flashinfer"
    logger = logging.getLogger("vllm.vime.workers")
    logger.addHandler(caplog.handler)  # vLLM's logger does not pass messages on
    with caplog.at_level("INFO", logger.name):
        choose_delta_kernel(config)
    logger.removeHandler(caplog.handler)
    assert layers._resolve_gdn_prefill_backend(config)[1] == kernel
    assert config.additional_config.get("own") == given.get("own")
    assert ("compute prompts in Triton" in caplog.text) == (kernel == "triton")


def test_other_models_keep_their_settings() -> None:
    config: Any = SimpleNamespace(
        additional_config={}, model_config=SimpleNamespace(hf_text_config=SimpleNamespace())
    )
    choose_delta_kernel(config)
    assert config.additional_config == {}
