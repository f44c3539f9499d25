"""Which experts of a layer a rank of an engine compares. Real engines: tests/e2e, tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vime.engine.live_experts import experts_of_rank, names_of_other_ranks

PATH = "model.layers.0.mlp.experts.routed_experts"


def layer(expert_map: list[int] | None) -> SimpleNamespace:
    return SimpleNamespace(expert_map=None if expert_map is None else torch.tensor(expert_map))


def test_a_rank_has_the_experts_of_its_map() -> None:
    assert experts_of_rank(layer(None), 4) == [0, 1, 2, 3]
    assert experts_of_rank(layer([-1, -1, 0, 1]), 2) == [2, 3]
    assert experts_of_rank(layer([-1, 1, -1, 0]), 2) == [3, 1]  # in the order of its parameters


def test_the_ranks_of_an_engine_compare_every_expert_once() -> None:
    """vLLM deals experts out in runs or in turn. In both ways, what a rank does not have the others have."""
    update = {f"model.layers.0.mlp.experts.{e}.w1.weight" for e in range(4)}
    for maps in ([[0, 1, -1, -1], [-1, -1, 0, 1]], [[0, -1, 1, -1], [-1, 0, -1, 1]]):
        own = [experts_of_rank(layer(of_rank), 2) for of_rank in maps]
        assert sorted(own[0] + own[1]) == [0, 1, 2, 3]
        for of_rank, others in zip(maps, reversed(own), strict=True):
            elsewhere = list(names_of_other_ranks(PATH, layer(of_rank), update))
            assert elsewhere == [
                f"model.layers.0.mlp.experts.{e}.{name}.weight" for e in others for name in ("w1", "w3", "w2")
            ]
    assert list(names_of_other_ranks(PATH, layer(None), update)) == []
