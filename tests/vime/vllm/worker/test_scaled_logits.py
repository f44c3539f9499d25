"""A model served at a temperature: vLLM's own layer, without an engine. The example's teacher is a real one."""

from __future__ import annotations

import pytest
import torch

from vime.vllm.worker import scaled_logits

pytest.importorskip("vllm")


def test_logits_are_divided_after_the_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    monkeypatch.setattr(LogitsProcessor, "__init__", LogitsProcessor.__init__)  # restored at the end
    raw = torch.tensor([[3.0, -7.0, 0.5]])
    with set_current_vllm_config(VllmConfig()):
        for _ in range(2):
            scaled_logits.install(0.7)
        plain = LogitsProcessor(3, logits_as_input=True)
        capped = LogitsProcessor(3, scale=0.5, soft_cap=5.0, logits_as_input=True)
    torch.testing.assert_close(plain(None, raw.clone()), raw / 0.7)
    torch.testing.assert_close(capped(None, raw.clone()), 5 * (raw / 5).tanh() * 0.5 / 0.7)
