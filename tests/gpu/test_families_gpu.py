"""Families that vLLM serves on GPUs only, as tests/e2e/test_engine_families.py has it for the others. NEVER RUN."""

from __future__ import annotations

import pytest
from family_cases import CASES
from family_engine import Trained, check_engine, trained_models

pytestmark = pytest.mark.gpu

SERVED = [name for name, case in CASES.items() if case.engine == "gpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_models(tmp_path_factory.mktemp("families"), SERVED)


@pytest.mark.parametrize("name", SERVED)
def test_trainer_and_engine_agree(trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The tolerance is that of float32 products in another order."""
    check_engine(trained, name, monkeypatch, tolerance=1e-4)
