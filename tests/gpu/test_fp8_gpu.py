"""Weights in blocks of fp8 on GPUs: the comparison with an update, and an engine of vLLM. NEVER RUN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_engine import TOKENS, trained_models
from fp8_cases import layer
from offline_engine import offline_engine

from vime.engine.live_quantised import quantised_pieces

pytestmark = pytest.mark.gpu


def test_compiled_codes_are_the_nearest() -> None:
    """vLLM compiles how it quantises: another order of products and divisions must still give the nearest values."""
    weight = torch.randn(1000, 1300, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    linear = torch.compile(layer, dynamic=True)(weight.bfloat16(), [1000])
    (piece,) = quantised_pieces(linear, [1000])
    assert piece.holds(weight)
    linear.weight.view(torch.uint8)[700, 600] += 1
    assert not piece.holds(weight)


def test_an_engine_takes_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/e2e/test_engine_fp8.py on CPUs, with activations in fp8 too."""
    root, found = trained_models(tmp_path, ["llama"])
    (before, first), (after, second) = found["llama"]
    settings = {"dtype": "bfloat16", "quantization": "fp8_per_block"}
    with offline_engine(root / "llama", root / "llama-weights", monkeypatch, **settings) as engine:
        assert (engine.log_probs(TOKENS) - before).abs().mean() < 0.2
        for update, expected in ((second, after), (first, before)):
            engine.take(update)  # with checksums: compares every live tensor
            assert (engine.log_probs(TOKENS) - expected).abs().mean() < 0.2
