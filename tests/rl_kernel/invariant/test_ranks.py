"""Two gloo processes share a product: bits of the forward, and gradients compared with the whole product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks
from torch import Tensor

import rl_kernel.invariant as invariant
from rl_kernel.invariant.layers import product
from rl_kernel.invariant.ranks import row_parallel_linear

RANKS, ROWS, INNER, OUTPUTS = 2, 10, 72, 34


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x [ROWS, 1, INNER] as in Megatron, the whole weight, its bias, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = (ROWS, 1, INNER), (OUTPUTS, INNER), (OUTPUTS,), (ROWS, 1, OUTPUTS)
    x, weight, bias, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, bias, upstream


def results(rank: int, ranks: int, group: Any) -> dict[str, list[Tensor]]:
    """Returns, per kind, the output and the gradients of x, weight and bias that this rank has."""
    x, weight, bias, upstream = problem()
    own = {size: slice(rank * size // ranks, (rank + 1) * size // ranks) for size in (ROWS, INNER, OUTPUTS)}

    def of(call: Any, tensors: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    by_input = x[..., own[INNER]], weight[:, own[INNER]]
    found = {}
    for name, scatter in (("row", False), ("row scattered", True)):
        found[name] = of(
            lambda x, w, scatter=scatter: invariant.row_parallel_linear(x, w, group, scatter=scatter),
            by_input,
            upstream[own[ROWS]] if scatter else upstream,
        )
    for name, gather in (("column", False), ("column gathered", True)):
        found[name] = of(
            lambda x, w, b, gather=gather: invariant.column_parallel_linear(x, w, b, group, gather=gather),
            (x[own[ROWS]] if gather else x, weight[own[OUTPUTS]], bias[own[OUTPUTS]]),
            upstream[..., own[OUTPUTS]],
        )
    return found


def on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS)
    found: dict[str, Any] = dict(results(rank, RANKS, dist.group.WORLD))
    try:
        row_parallel_linear(torch.zeros(3, 4), torch.zeros(5, 4), dist.group.WORLD, scatter=True)
    except ValueError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    on_ranks(on_rank, str(folder), ranks=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def plain() -> list[Tensor]:
    """Returns output and gradients of the whole product, in float64."""
    x, weight, bias, upstream = (tensor.double() for tensor in problem())
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    out = torch.nn.functional.linear(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(two):
    x, weight, _, _ = problem()
    halves = zip(x[:, 0].chunk(RANKS, -1), weight.chunk(RANKS, -1), strict=True)
    first, second = (product(*half, dtype=torch.float64) for half in halves)
    wanted = (first + second).float()[:, None]
    for rank in two:
        assert torch.equal(rank["row"][0], wanted)
    assert torch.equal(torch.cat([rank["row scattered"][0] for rank in two]), wanted)


def test_outputs_of_a_rank_have_the_bits_of_the_whole_product(two):
    x, weight, bias, _ = problem()
    wanted = invariant.linear(x, weight, bias)
    for name in ("column", "column gathered"):
        assert torch.equal(torch.cat([rank[name][0] for rank in two], -1), wanted), name


def test_values_and_gradients_are_those_of_one_product(two):
    out, of_x, of_weight, of_bias = plain()
    row = out - problem()[2].double()

    def close(found: Tensor, wanted: Tensor, name: str) -> None:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5, msg=name)

    for name in ("row", "row scattered"):
        dim = 0 if name == "row scattered" else None
        values = two[0][name][0] if dim is None else torch.cat([rank[name][0] for rank in two])
        close(values, row, name)
        close(torch.cat([rank[name][1] for rank in two], -1), of_x, f"{name}: x")
        close(torch.cat([rank[name][2] for rank in two], -1), of_weight, f"{name}: weight")
    for rank in two:
        close(rank["column"][1], of_x, "column: x")
    close(torch.cat([rank["column gathered"][1] for rank in two]), of_x, "column gathered: x")
    for name in ("column", "column gathered"):
        close(torch.cat([rank[name][2] for rank in two]), of_weight, f"{name}: weight")
        close(torch.cat([rank[name][3] for rank in two]), of_bias, f"{name}: bias")


def test_rows_that_do_not_fit_the_ranks_are_an_error(two):
    for rank in two:
        assert rank["error"] == ("rows must be a multiple of the 2 ranks to be scattered, got 3; pad x")


def test_parts_are_added_in_rank_order_and_rounded_once():
    """Four ranks add their parts. In another order, or in the dtype of the input, the small part would be lost."""
    x, weight = torch.ones(1, 1), torch.ones(1, 1)
    for parts, wanted in (([1e30, -1e30, 1.0, 0.0], 1.0), ([1.0, 1e30, -1e30, 0.0], 0.0)):
        gathered = torch.tensor(parts, dtype=torch.float64).view(4, 1, 1)
        assert (
            invariant.linear_over_ranks(x, weight, lambda part, gathered=gathered: gathered).item() == wanted
        )
    small = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24], dtype=torch.float64).view(4, 1, 1)
    total = invariant.linear_over_ranks(x, weight, lambda part: small)
    assert total.dtype == torch.float32 and total.item() == 1 + 2.0**-22


def test_a_row_of_a_sum_does_not_depend_on_the_others():
    x, weight, _, _ = problem()
    first, second = x[:, 0].chunk(2, -1)
    other = weight[:, INNER // 2 :]

    def both(rows: slice) -> Tensor:
        return invariant.linear_over_ranks(
            first[rows],
            weight[:, : INNER // 2],
            lambda part: torch.stack((part, product(second[rows], other, dtype=part.dtype))),
        )

    together = both(slice(None))
    assert torch.equal(together, torch.cat([both(slice(i, i + 1)) for i in range(ROWS)]))
