"""Families whose engine on CPUs has parts of our own (vime.engine.cpu_experts, cpu_vision) or other kernels than on
GPUs, as tests/e2e/test_engine_families.py has them. NEVER RUN."""

from __future__ import annotations

import pytest
from family_cases import CASES
from family_engine import Trained, check_engine, trained_models

pytestmark = pytest.mark.gpu

SERVED = [
    name
    for name, case in CASES.items()
    if case.engine and case.kind.startswith(("minimax", "qwen3_next", "qwen3_5"))
]
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}
"""In float32: that of products in another order."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_models(tmp_path_factory.mktemp("families"), SERVED)


@pytest.mark.parametrize("name", SERVED)
def test_trainer_and_engine_agree(trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_engine(trained, name, monkeypatch, tolerance=TOLERANCE[CASES[name].dtype])
