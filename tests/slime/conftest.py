"""Fixtures that the files of trainer tests share."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_cases import CALLS, make_checkpoints, make_config

from slime.megatron_backend.trainer import MegatronTrainer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("trainer")
    make_checkpoints(root)
    return root


@pytest.fixture
def build(root, tmp_path):
    """Trainers one after another: the process groups of the last one end with the next one, or with the test."""
    made: list[MegatronTrainer] = []

    def build_one(**flags: Any) -> MegatronTrainer:
        while made:
            made.pop().close()
        config = make_config(root, weight_dir=str(tmp_path / "weights"), **flags)
        store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        made.append(MegatronTrainer(config, 0, 1, init_method=f"file://{store}"))
        return made[-1]

    CALLS.clear()
    yield build_one
    while made:
        made.pop().close()
