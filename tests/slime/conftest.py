"""Provides shared fixtures: `root` and `build` for the trainer, `single_rank` and `hf_dir` for models without a
trainer, `checkpoint` for the rollout manager."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import megatron_cases
import pytest
from config_cases import HF_CONFIG
from rollout_double import STATES, make_tokenizer
from trainer_cases import CALLS, make_checkpoints, make_config

from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.megatron_backend.step.trainer import MegatronTrainer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("trainer")
    make_checkpoints(root)
    return root


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory):
    """Creates process groups of one rank, for a file that builds models without a trainer."""
    init_parallel(
        0, 1, megatron_cases.make_config(), init_method=f"file://{tmp_path_factory.mktemp('init')}/store"
    )
    yield
    destroy_parallel()


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    """Writes a tiny checkpoint in Hugging Face's format."""
    directory = tmp_path_factory.mktemp("hf")
    megatron_cases.tiny_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes the files of a checkpoint that a rollout reads: config.json and tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({**HF_CONFIG, "vocab_size": len(tokenizer)}))
    return directory


@pytest.fixture(autouse=True)
def states_close() -> Iterator[None]:
    """Closes each rollout state that ran, because it has two threads and an event loop."""
    yield
    while STATES:
        STATES.pop().close()


@pytest.fixture
def build(root, tmp_path):
    """Builds trainers one after another. The process groups of a trainer end with the next trainer or with the test."""
    made: list[MegatronTrainer] = []

    def end() -> None:
        while made:
            made.pop().close()

    def build_one(**flags: Any) -> MegatronTrainer:
        end()
        config = make_config(root, weight_dir=str(tmp_path / "weights"), **flags)
        store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        made.append(MegatronTrainer(config, 0, 1, init_method=f"file://{store}"))
        return made[-1]

    CALLS.clear()
    build_one.end = end
    yield build_one
    end()
