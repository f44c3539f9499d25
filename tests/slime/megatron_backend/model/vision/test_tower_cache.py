"""Tests that a frozen tower computes an image once per rollout, and that its rows do not depend on the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import make_config, tiny_checkpoint
from torch import Tensor, nn
from tower_cases import KEYS, image_hidden, make_samples, read_vision

from slime.data.media.tower_cache import TowerCache
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models.vision import Vision
from slime.types import TrainData

GRIDS = [[(1, 4, 8)], [(1, 6, 4), (1, 4, 4)], []]


@dataclass
class Tiny:
    model: nn.Module
    vision: Vision
    data: TrainData

    def hidden(self, cache: TowerCache | None, samples: list[int]) -> Tensor:
        """Returns the hidden states of a micro-batch."""
        data: Any = {name: [column[i] for i in samples] for name, column in self.data.items()}
        return image_hidden(self.model, data, self.vision, cache=cache).detach()

    def count_runs(self) -> list[int]:
        """Returns a list that gets the number of images of each later call of the tower."""
        runs: list[int] = []
        tower = unwrap(self.model).vision_model
        assert tower is not None
        tower.register_forward_hook(lambda _, __, kw, ___: runs.append(len(kw["grid_thw"])), with_kwargs=True)
        return runs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns a tiny Qwen3-VL, whose tower has rows for the first decoder layers, too."""
    root = tmp_path_factory.mktemp("tower")
    init_parallel(0, 1, make_config(), init_method=f"file://{root}/store")
    tiny_checkpoint(root / "hf", "qwen3_vl")
    yield root / "hf"
    destroy_parallel()


def make_tiny(checkpoint: Path, **flags: Any) -> Tiny:
    model = build_model(load_hf_config(checkpoint), make_config(multimodal_keys=KEYS, **flags))
    load_hf(model, checkpoint)
    vision = read_vision(checkpoint)
    return Tiny(model, vision, make_samples(vision, GRIDS))


def test_a_frozen_tower_computes_an_image_once(checkpoint: Path) -> None:
    tiny = make_tiny(checkpoint)
    runs, cache = tiny.count_runs(), TowerCache()
    batches = [[0, 0, 1, 2], [1, 0], [2], [0]]
    with_cache = [tiny.hidden(cache, batch) for batch in batches]
    assert runs == [3], "each distinct image once"
    without = [tiny.hidden(None, batch) for batch in batches]
    assert runs == [3, 3, 3, 1]
    assert torch.equal(with_cache[0], without[0]), "equal to the bit for equal calls of the tower"
    for cached, computed in zip(with_cache, without, strict=True):
        torch.testing.assert_close(cached, computed, rtol=0, atol=1e-6)
    assert torch.equal(with_cache[0][:5], with_cache[3][:5]), "equal to the bit between micro-batches"
    cache.clear()
    assert torch.equal(tiny.hidden(cache, [0]), without[3]) and runs == [3, 3, 3, 1, 1]


def test_an_image_beside_a_stored_one_is_computed(checkpoint: Path) -> None:
    tiny = make_tiny(checkpoint)
    runs, cache = tiny.count_runs(), TowerCache()
    tiny.hidden(cache, [0])
    found = tiny.hidden(cache, [1, 0, 1])
    assert runs == [1, 2]
    torch.testing.assert_close(found, tiny.hidden(None, [1, 0, 1]), rtol=0, atol=1e-6)


def test_an_image_that_does_not_fit_is_computed_again(checkpoint: Path) -> None:
    tiny = make_tiny(checkpoint)
    deep, runs = len(unwrap(tiny.model).vision_model.deepstack_merger_list), tiny.count_runs()
    cache = TowerCache(most_bytes=(1 + deep) * 8 * tiny.vision.out * 4)  # the image of sample 0 has 8 rows
    found = [tiny.hidden(cache, batch) for batch in ([0], [0, 1], [0, 1])]
    assert runs == [1, 2, 2]
    assert torch.equal(found[1], found[2])


def test_a_trained_tower_has_no_cache(checkpoint: Path) -> None:
    """Its weights change in each step. All images of a micro-batch are one call."""
    tiny = make_tiny(checkpoint, train_vision=True)
    runs, cache = tiny.count_runs(), TowerCache()
    before = tiny.hidden(cache, [0, 1])
    with torch.no_grad():
        for parameter in unwrap(tiny.model).vision_model.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(tiny.hidden(cache, [0, 1]), before)
    assert runs == [3, 3]


def test_two_models_have_their_own_rows(checkpoint: Path) -> None:
    policy, reference = make_tiny(checkpoint), make_tiny(checkpoint)
    for parameter in unwrap(reference.model).vision_model.parameters():
        parameter.data.mul_(1.5)
    cache = TowerCache()
    assert not torch.equal(policy.hidden(cache, [0]), reference.hidden(cache, [0]))
    assert torch.equal(reference.hidden(cache, [0]), reference.hidden(None, [0]))
