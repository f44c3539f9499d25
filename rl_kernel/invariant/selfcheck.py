"""Checks whether the operators run on this machine and keep their guarantee. It compares rows alone and in a batch, bit
for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_kernel.dispatch import machine_refusal
from rl_kernel.invariant import layers
from rl_kernel.invariant.causal import attention
from rl_kernel.invariant.experts import (
    choose_experts,
    expert_outputs,
    expert_weights,
    router_logits,
    sum_rows,
)
from rl_kernel.invariant.head import log_softmax
from rl_kernel.invariant.ranks import linear_over_ranks

ROWS, WIDTH, OUTPUTS, HEADS, GROUPS, SIZE, EXPERTS = 37, 96, 80, 4, 2, 32, 6
TALL, INNER = 304, 512
"""Rows and outputs, and inputs, of a product whose tiles have several parts each."""
WINDOW = 70
"""Keys that a query of a windowed attention over TALL keys sees: more than one step of the kernel."""

Rows = Callable[[Tensor], Tensor]
"""Maps rows [n, ...] to their results [n, ...]; the operator holds its weights."""


def _operators(device: torch.device | str, dtype: torch.dtype) -> dict[str, tuple[Tensor, Rows]]:
    """Returns name -> (rows, operator) for each operator."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, as_dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, as_dtype)

    rows, weight, gain = draw(ROWS, WIDTH), draw(OUTPUTS, WIDTH), draw(WIDTH)
    frequencies = draw(SIZE // 2, as_dtype=torch.float32).abs()
    positions = torch.arange(ROWS, device=device) * 1000

    def angle_table(positions: Tensor) -> Tensor:
        cos, sin = layers.angles(positions, frequencies)
        return torch.cat((cos, sin), -1)

    table = torch.stack(layers.angles(positions, frequencies))
    found: dict[str, tuple[Tensor, Rows]] = {
        "linear": (rows, lambda x: layers.linear(x, weight)),
        "linear_over_ranks": (rows, lambda x: _by_two_ranks(x, weight)),
        "rms_norm": (rows, lambda x: layers.rms_norm(x, gain, 1e-6)),
        "swiglu": (rows, layers.swiglu),
        "angles": (positions, angle_table),
        "rotate": (
            draw(ROWS, HEADS, SIZE),
            lambda x: layers.rotate(x, table, positions.new_full((len(x),), ROWS - 1)),
        ),
        "log_softmax": (draw(ROWS, OUTPUTS, as_dtype=torch.float32) * 8, log_softmax),
    }
    shapes = ((EXPERTS, WIDTH), (EXPERTS, 2 * SIZE, WIDTH), (EXPERTS, WIDTH, SIZE))
    found["experts"] = (rows, _experts(*(draw(*shape) for shape in shapes)))
    on_host = torch.device(device).type == "cpu"
    query_rows = _queries(draw) if on_host else _packed_queries(draw, ROWS, None)
    found["attention"] = (torch.arange(ROWS, device=device), query_rows)
    if not on_host:  # where a host gets the keys that a query sees as a mask
        found["attention with a window"] = (
            torch.arange(TALL, device=device),
            _packed_queries(draw, TALL, WINDOW),
        )
    return found


def _by_two_ranks(x: Tensor, weight: Tensor) -> Tensor:
    """Computes the product of two ranks with half of the inputs each, on one device."""
    (first, second), (first_weight, second_weight) = x.chunk(2, 1), weight.chunk(2, 1)
    return linear_over_ranks(
        first,
        first_weight,
        lambda part: torch.stack((part, layers.product(second, second_weight, dtype=part.dtype))),
    )


def _experts(router: Tensor, first: Tensor, second: Tensor) -> Rows:
    """Returns a layer of experts."""

    def layer(x: Tensor) -> Tensor:
        logits = router_logits(x, router)
        ids = choose_experts(logits, 2)
        weights = expert_weights(logits, ids, normalised=True)
        return sum_rows(*expert_outputs(x, ids, weights, first, second), x.dtype)

    return layer


def _queries(draw: Callable[..., Tensor]) -> Rows:
    """Returns the attention of one sequence as a function of positions: their queries are in the call, and the keys end
    at the last of these positions."""
    query, key, value = (
        draw(1, HEADS, ROWS, SIZE),
        draw(1, GROUPS, ROWS, SIZE),
        draw(1, GROUPS, ROWS, SIZE),
    )

    def attend(positions: Tensor) -> Tensor:
        end = int(positions.max()) + 1
        seen = (positions[:, None] >= torch.arange(end, device=positions.device))[None, None]
        out = attention(query[:, :, positions], key[:, :, :end], value[:, :, :end], seen, SIZE**-0.5)
        return out[0].transpose(0, 1)

    return attend


def _packed_queries(draw: Callable[..., Tensor], count: int, window: int | None) -> Rows:
    """Returns `_queries` of `count` positions for packed sequences: all positions in order form one sequence, any other
    positions form one sequence each."""
    query, key, value = draw(count, HEADS, SIZE), draw(count, GROUPS, SIZE), draw(count, GROUPS, SIZE)
    whole = torch.arange(count, device=query.device)

    def attend(positions: Tensor) -> Tensor:
        from rl_kernel.invariant import kernels

        if torch.equal(positions, whole):
            first, lengths, most = whole.new_tensor([0, count]), whole.new_tensor([count]), count
        else:
            first, lengths, most = torch.arange(len(positions) + 1, device=positions.device), positions + 1, 1
        rows = query[positions].contiguous()
        return kernels.attention(
            *(rows, key, value, torch.empty_like(rows), first, lengths, most, SIZE**-0.5),
            first_key=torch.zeros_like(lengths),
            window=window,
        )

    return attend


def refusal(device: torch.device | str) -> str | None:
    """Returns the reason why the operators cannot run on this device, or None if they can."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if reason := machine_refusal(device.type):
        return reason
    from rl_kernel.invariant.kernels import product

    properties: Any = torch.cuda.get_device_properties(device)  # torch's types leave the attribute out
    there = properties.shared_memory_per_block_optin
    if there < product.SHARED_BYTES:
        return (
            f"a program has {there // 1024} KiB of the GPU's shared memory and the kernels need "
            f"{product.SHARED_BYTES // 1024}"
        )
    return None


def broken(device: torch.device | str, dtype: torch.dtype) -> list[str]:
    """Returns the operators whose bits for a row change with the other rows, their number or their order. [] means that
    all operators keep the guarantee.

    `dtype` is the model's dtype. Call `refusal` first. Takes some milliseconds; on a GPU, the first call compiles
    kernels.
    """
    names = []
    for name, (rows, operator) in _operators(device, dtype).items():
        together = operator(rows)
        backwards = operator(rows.flip(0)).flip(0)
        few = [0, 1, len(rows) // 2, len(rows) - 1]
        alone = torch.cat([operator(rows[i : i + 1]) for i in few])
        if not (torch.equal(together, backwards) and torch.equal(together[few], alone)):
            names.append(name)
    if torch.device(device).type == "cuda" and not _tiles_agree(device, dtype):
        names.append("tiles of products")
    return names


def _tiles_agree(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Returns whether a product on a GPU has the same bits with every tile, also as the product of an expert."""
    from rl_kernel.invariant.kernels import experts, product

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, TALL, INNER, generator=generator).to(device, dtype)
    first, *others = (product.linear(x, weight, None, tile) for tile in product.TILES)
    unrounded = product.linear(x, weight, None, dtype=torch.float32)
    # the first expert has TALL - 3 rows, the second has none, and the third has 3
    ends = torch.tensor([TALL - 3, TALL - 3, TALL], dtype=torch.int32, device=x.device)
    same = weight.expand(len(ends), *weight.shape)
    by_experts = [experts.expert_products(x, ends, same, dtype, tile) for tile in experts.TILES]
    return all(torch.equal(first, other) for other in [*others, unrounded.to(dtype), *by_experts])
