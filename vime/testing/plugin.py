"""Fixtures of pytest: `tiny_model`, `tiny_engine`, `tiny_trainer` and `tiny_run`.

pytest imports this module at each start where vime is installed. Therefore it imports nothing of vime at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vime.api.live import LiveRun
    from vime.testing.engine import TinyEngine
    from vime.testing.trainer import Trained


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Hugging Face folder of a tiny Qwen3 with random weights."""
    from vime.testing.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    """Yields a vLLM engine on the CPU with the tiny model, behind a router. All tests of the session share it."""
    from vime.testing.engine import TinyEngine

    engine = TinyEngine(tmp_path_factory.mktemp("tiny-engine"))
    try:
        yield engine.start()
    finally:
        engine.stop()


@pytest.fixture
def tiny_trainer(tiny_model: Path, tmp_path: Path) -> Callable[..., Trained]:
    """Returns the function `vime.testing.trainer.train_step` with the tiny model: one optimizer step on given
    samples."""
    from vime.testing.trainer import train_step

    return partial(train_step, tiny_model, tmp_path / "trainer")


@pytest.fixture
def tiny_run(tiny_model: Path, tmp_path: Path) -> Callable[..., LiveRun]:
    """Returns the function `vime.testing.run.start_tiny_run` with the tiny model: a whole run of `vime.train`."""
    from vime.testing.run import start_tiny_run

    return partial(start_tiny_run, tiny_model, tmp_path)
