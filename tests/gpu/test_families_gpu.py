"""Tests tiny models of families on one GPU: vLLM's log-probs equal the trainer's, before and after an update of live
weights.

tests/e2e/engines/test_engine_families.py does the same on CPUs. Here the dtype is bfloat16, in which trainer and
engine have their kernels.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet
from family_cases import CASES
from family_engine import Trained, check_engine, trained_models

from slime.models import FAMILIES
from vime.vllm.versions import installed, lacks_deep_gemm, misreads_sizes, missing_architecture

pytestmark = pytest.mark.gpu

SERVED = (
    *("llama", "mistral", "glm4", "mimo", "gemma3", "gpt-oss", "qwen2-moe", "minimax-m2"),
    *("olmo3", "nemotron-h", "nemotron-3"),
    *("deepseek", "kimi-k2", "kimi-k2-5", "glm4-moe-lite", "gemma2"),
)
DELTA_NETS = [name for name, case in CASES.items() if case.kind.startswith(("qwen3_next", "qwen3_5"))]
NEVER_RUN = ("gemma4", "gemma4-moe", "gemma4-published", "glm-5", "deepseek-v32")
_LATENT = {"qk_nope_head_dim": 128, "v_head_dim": 128}
SHAPES = {
    **dict.fromkeys(("deepseek", "kimi-k2", "kimi-k2-5"), _LATENT),
    "glm4-moe-lite": {"qk_nope_head_dim": 192, "v_head_dim": 256},
}
"""The published sizes of latent attention. vLLM's kernels for prompts on GPUs have no others."""
DTYPE, TOLERANCE = "bfloat16", 0.05
"""Largest mean difference over tokens, in nats."""


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains the models of the selected tests in this file."""
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if not item.get_closest_marker("skip")]
    return trained_models(tmp_path_factory.mktemp("families"), names, shapes=SHAPES, dtype=DTYPE)


def served(name: str) -> ParameterSet:
    """Returns a case. It is skipped if `check_architecture` or `require_deep_gemm` would end a run with this model."""
    kind = CASES[name].kind
    lacks = missing_architecture(kind) or (misreads_sizes(kind) and "sizes per layer")
    if kind in FAMILIES and lacks_deep_gemm(FAMILIES[kind].defaults):
        lacks = "DeepGEMM"
    return pytest.param(name, marks=[pytest.mark.skip(f"vLLM {installed()} has no {lacks}")] if lacks else [])


@pytest.mark.parametrize("name", [served(name) for name in (*SERVED, *DELTA_NETS)])
def test_trainer_and_engine_agree(trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_engine(trained, name, monkeypatch, TOLERANCE, DTYPE)


@pytest.mark.parametrize("name", [served(name) for name in NEVER_RUN])
def test_trainer_and_engine_of_new_families_agree_never_run(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check_engine(trained, name, monkeypatch, TOLERANCE, DTYPE)
