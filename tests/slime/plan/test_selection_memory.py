"""Compares the plan's memory of a lightning indexer's selection with its allocations on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from memory_cases import config
from published_sizes import GLM5, V32

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import RotaryAngles, packed_layout
from slime.megatron_backend.model.latent import selection
from slime.models.latent import Indexer
from slime.plan.memory_estimate import estimate
from slime.plan.model_shape import Shape
from slime.plan.step_memory import selection_memory

LENGTHS = ([2048], [700, 600, 500, 248])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("most", [2**16, 2**20, 2**22])
def test_the_plan_counts_the_allocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], most: int
) -> None:
    for module in (selection, selection_memory):
        monkeypatch.setattr(module, "MOST_SCORES", most)
    tokens, sizes = sum(lengths), Indexer(heads=16, size=32, topk=64)
    core: Any = SimpleNamespace(hidden_size=256, sequence_parallel=False)
    indexer = selection.LightningIndexer(core, 128, sizes).bfloat16()
    hidden, latent = (torch.randn(tokens, 1, width, dtype=torch.bfloat16) for width in (256, 128))
    layout = packed_layout(token_slice(lengths), "cpu")
    angles = layout.positions[:, None, None] * torch.rand(8)
    layout.rotary = [RotaryAngles(angles.cos(), angles.sin(), interleaved=False)]
    peak = peak_bytes(lambda: indexer(hidden, latent, layout), tmp_path / "trace.json")
    monkeypatch.setattr(selection_memory, "own_indexer", lambda shape: sizes)
    planned, _ = selection_memory.selection_memory(config(), Shape.of(GLM5), tokens, 2)
    assert peak == pytest.approx(planned, rel=0.07)


@pytest.mark.parametrize("hf", [GLM5, V32])
def test_a_plan_has_the_selection_of_long_sequences(hf: dict[str, Any]) -> None:
    def selecting(**flags: Any) -> list[str]:
        return [item.arithmetic for item in estimate(config(**flags), hf).work if "selection" in item.name]

    (how,) = selecting()
    heads = hf["index_n_heads"]
    one = 9216 * (heads + 1) * 128 * 2
    assert (
        f"3 x {one / 2**20:.2f} MiB of the indexer's queries + 67.1 M scores in fp32 + 72.00 MiB selected"
        in how
    )
    assert not selecting(rollout_max_context_len=2048)
