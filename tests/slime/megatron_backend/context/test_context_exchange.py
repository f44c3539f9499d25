"""Compares the attention of two and four context-parallel ranks with that of one, for both values of --cp-comm-type:
results, gradients, and the memory that a rank keeps."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from megatron.core import parallel_state
from rank_processes import in_layouts, on_ranks
from torch import Tensor
from torch.nn.functional import pad

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import PackedAttention, packed_layout

LENGTHS = [37, 1, 5, 64, 2, 90]
HEADS, SIZE = 8, 4
WAYS = ("a2a", "all_gather")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "cap": {"cap": 2.0},
    "sinks": {"sinks": True},
}
GROUPS = (8, 4, 2, 1)
LONG, LONG_GROUPS = 4096, 4


def inputs(lengths: list[int], groups: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Returns query, key and value of a row, and the gradient of its output."""
    generator = torch.Generator().manual_seed(groups)
    sizes = (HEADS, groups, groups)
    found = [
        torch.randn(sum(lengths), n, SIZE, generator=generator, dtype=dtype, requires_grad=True)
        for n in sizes
    ]
    return found, torch.randn(sum(lengths), HEADS * SIZE, generator=generator, dtype=dtype)


def attend(case: str, groups: int, way: str, part: Any, group: Any) -> tuple[Tensor, list[Tensor]]:
    """Returns the output of a rank's tokens, and the gradients of its queries, keys, values and sinks."""
    leaves, upstream = inputs(LENGTHS, groups, torch.float64)
    config: Any = SimpleNamespace(kv_channels=SIZE, num_attention_heads=HEADS, tensor_model_parallel_size=1)
    attention = PackedAttention(config, rope=None, cp_comm_type=way, **CASES[case])
    if attention.sinks is not None:
        attention.sinks.data = torch.linspace(-1, 1, HEADS)
    mine = [pad(x[part.tokens], (0, 0, 0, 0, 0, part.rows - len(part.tokens))) for x in leaves]
    out = attention(*mine, None, packed_seq_params=packed_layout(part, "cpu", group))
    assert not out[len(part.tokens) :].any()
    wanted = [*leaves, *([] if attention.sinks is None else [attention.sinks])]
    own = out[: len(part.tokens)]
    return own.detach(), list(torch.autograd.grad(own, wanted, upstream[part.tokens]))


def kept_and_peak(way: str, part: Any, group: Any, trace: Path) -> tuple[int, int]:
    """Returns the bytes that an attention over one long sequence keeps for its backward, and the peak of both."""
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, LONG_GROUPS, LONG_GROUPS)
    mine = [torch.randn(part.rows, n, SIZE, generator=generator, requires_grad=True) for n in sizes]
    attention = PackedAttention(SimpleNamespace(kv_channels=SIZE), rope=None, cp_comm_type=way)  # type: ignore[arg-type]
    layout = packed_layout(part, "cpu", group)
    attention(*mine, None, packed_seq_params=layout)  # the layout makes its tensors at the first use
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point():
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        held = attention(*mine, None, packed_seq_params=layout)
    total = sum(kept.values())
    del held

    def both() -> None:
        attention(*mine, None, packed_seq_params=layout).sum().backward()

    return total, peak_bytes(both, trace)


def work(rank: int, root: Path) -> None:
    found: dict[Any, Any] = {}
    layouts = {str(size): {"context_parallel_size": size} for size in (2, 4)}
    for _, config in in_layouts(layouts, rank, 4, root):
        group, size = parallel_state.get_context_parallel_group(), config.megatron.context_parallel_size
        part = token_slice(LENGTHS, rank=group.rank(), size=size, multiple=3)
        for case, groups, way in itertools.product(CASES, GROUPS, WAYS):
            found[size, case, groups, way] = part.tokens, *attend(case, groups, way, part, group)
        long = token_slice([LONG], rank=group.rank(), size=size)
        for way in WAYS:
            found[size, way] = kept_and_peak(way, long, group, root / f"trace-{rank}.json")
    torch.save(found, root / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Returns the results of each rank of the first group, by the number of ranks in a group."""
    root = tmp_path_factory.mktemp("ranks")
    on_ranks(work, root, ranks=4)
    found = [torch.load(root / f"rank{rank}.pt") for rank in range(4)]
    return {
        size: [{key[1:]: value for key, value in each.items() if key[0] == size} for each in found[:size]]
        for size in (2, 4)
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_the_attention_of_one(several, case, groups, way):
    """Float64, and the gradient of a leaf is the sum over ranks. Caps and sinks have a softmax in float32."""
    out, grads = attend(case, groups, way, token_slice(LENGTHS), None)
    atol = 1e-12 if case in ("plain", "window") else 1e-5
    for results in several.values():
        found = [result[case, groups, way] for result in results]
        for tokens, mine, _ in found:
            torch.testing.assert_close(mine, out[tokens], rtol=0, atol=atol)
        for index, wanted in enumerate(grads):
            summed = sum(part[2][index] for part in found)
            torch.testing.assert_close(summed, wanted, rtol=0, atol=10 * atol)
            assert wanted.abs().max() > 0.01


def test_memory_of_a_rank_falls_with_the_ranks(several, tmp_path):
    """A rank that exchanges heads keeps its share to the byte, and its peak falls. A rank that gathers keeps the keys
    and values of the whole sequence, and a mask on the CPU."""
    kept, peak = kept_and_peak("a2a", token_slice([LONG]), None, tmp_path / "trace.json")
    of_two, of_four = ([result["a2a",] for result in several[ranks]] for ranks in (2, 4))
    copy = LONG * HEADS * SIZE * 4  # the output after the exchange, which one rank does not have twice
    assert {held for held, _ in of_two} == {(kept + copy) // 2}
    assert {held for held, _ in of_four} == {(kept + copy) // 4}
    # gloo frees what it sent some time later, so that the peaks of two runs differ
    assert max(top for _, top in of_four) < 0.75 * peak
    for ranks in (2, 4):
        for result in several[ranks]:
            assert result["all_gather",][0] > 2 * kept and result["all_gather",][1] > 2 * peak
