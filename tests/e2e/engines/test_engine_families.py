"""Trains a tiny model per family in Megatron and publishes it to a real vLLM. Log-probs of trainer and engine are
equal before and after an update of live weights.

One process trains all models. Then this process, which imports vLLM once, makes one engine after the other.
"""

from __future__ import annotations

import pytest
from family_cases import CASES
from family_engine import Trained, check_engine, trained_models

pytestmark = pytest.mark.e2e

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}
SERVED = [name for name, case in CASES.items() if case.engine]
SLOW = {
    *("qwen3-5-text", "qwen3-5-moe", "qwen3-5-moe-text", "llama-untied-yarn", "mistral", "kimi-k2"),
    *("deepseek-plain-queries", "qwen2-moe", "gemma2", "deepseek-v32", "kimi-k2-5", "gemma4-moe"),
}
"""Families that run in slow tests only. Their layers are those of qwen3-5, llama, deepseek, qwen3-next, gemma3,
gemma4-published and gpt-oss, which run on each change."""
MODELS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SERVED]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    names = [name for name in SERVED if any(f"[{name}]" in item.name for item in request.session.items)]
    return trained_models(tmp_path_factory.mktemp("families"), names)


@pytest.mark.parametrize("name", MODELS)
def test_trainer_and_engine_agree(trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_engine(trained, name, monkeypatch, TOLERANCE[CASES[name].dtype])


EMPTY = ("gemma4-published",)
"""Families that start empty on each change: gemma4-published has buffers that files hold, and others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EMPTY else [pytest.mark.slow]) for name in SERVED]
)
def test_an_update_brings_every_value(trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Engines on GPUs start without the checkpoint's weights."""
    check_engine(trained, name, monkeypatch, TOLERANCE[CASES[name].dtype], empty=True)
