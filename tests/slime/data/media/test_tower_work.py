"""Tests the FLOPs of vision towers per pass, and their sum over the ranks of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_cases import tiny_checkpoint
from tower_cases import KEYS, read_vision
from trainer_cases import make_config

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.data.media.tower_work import sum_tower_work
from slime.data.rank_data import RankData
from slime.models.vision import Vision
from slime.plan.tower import tower_flops
from slime.vision.inputs import ImageInputs, MediaFile

A, B = (1, 4, 8), (1, 6, 4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work")
    tiny_checkpoint(root / "policy", "qwen3_vl")
    return root


def image(key: str, grid: tuple[int, int, int]) -> ImageInputs:
    return ImageInputs((MediaFile("image", key, "no file is read", tokens=1, grid=grid),))


def rank_data() -> RankData:
    """Returns two steps of two micro-batches. Image a is in three micro-batches, and b in the last one."""
    images = [image("a", A), image("a", A), image("a", A), None, image("a", A), image("b", B)]
    return RankData(
        multimodal_train_inputs=images,
        micro_batch_indices=[[0, 1], [2], [3], [4, 5]],
        num_microbatches=[2, 2],
    )


def work(root: Path, ranks: list[RankData], **flags: Any) -> dict[str, float]:
    config: Config = make_config(root, multimodal_keys=KEYS, num_steps_per_rollout=2, **flags)
    return sum_tower_work(config, read_hf_config(root / "policy"), ranks)


def test_a_frozen_tower_counts_an_image_once(root: Path) -> None:
    vision: Vision = read_vision(root / "policy")
    a, b = tower_flops(vision, [A]), tower_flops(vision, [B])
    assert work(root, [rank_data()]) == {"log_probs": a + b, "ref_log_probs": a + b, "actor_train": 0.0}
    two = work(root, [rank_data(), rank_data()])
    assert two == {"log_probs": 2 * (a + b), "ref_log_probs": 2 * (a + b), "actor_train": 0.0}
    no_pass = work(root, [rank_data()], use_rollout_logprobs=True)
    assert no_pass == {"log_probs": 0.0, "ref_log_probs": a + b, "actor_train": a + b}


def test_a_trained_tower_counts_each_micro_batch_and_the_backward(root: Path) -> None:
    vision: Vision = read_vision(root / "policy")
    a, b = tower_flops(vision, [A]), tower_flops(vision, [B])
    found = work(root, [rank_data()], train_vision=True)
    assert found == {"log_probs": a + b, "ref_log_probs": a + b, "actor_train": 3 * (3 * a + b)}


def test_a_run_of_text_has_no_tower(root: Path) -> None:
    assert sum_tower_work(make_config(root), read_hf_config(root / "policy"), [rank_data()]) == {}
