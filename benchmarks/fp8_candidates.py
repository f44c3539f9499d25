"""Times candidates for the products and quantisers of rl_kernel.fp8: settings of the Triton kernels, and DeepGEMM.

    python benchmarks/fp8_candidates.py OUT.json [--only dense|rounding|experts]

A line has the milliseconds of a candidate, and its largest difference from the first candidate of the same product,
relative to the largest value. A candidate that fails has its error instead.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fp8_products import COUNT, EXPERTS, LAYERS, Timer
from torch import Tensor
from torch.nn.functional import grouped_mm

from rl_kernel.fp8 import library
from rl_kernel.fp8.kernels import RowGroups, multiply_columns, multiply_rows, quantize, quantize_blocks
from rl_kernel.fp8.kernels.products import Launch

LAUNCHES = (Launch(), Launch(8, 3), Launch(8, 3, 128), Launch(4, 4))
ROUNDING = ((8, 80), (8, 128), (16, 64), (4, 128), (8, 64))
"""Warps and registers of the quantisers."""
ROWS = 16384

Candidates = Iterator[tuple[str, Callable[[], Any]]]


def random(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda").bfloat16()


def dense(shape: tuple[int, int], deepgemm: Any) -> Iterator[tuple[str, Candidates]]:
    outputs, inputs = shape
    x, weight, upstream = random(ROWS, inputs), random(outputs, inputs), random(ROWS, outputs)
    rows, columns = quantize(x, None, rows=True, columns=True, power_of_two=False)
    grads, grad_columns = quantize(upstream, None, rows=True, columns=True, power_of_two=False)
    plain, turned = quantize_blocks(weight[None], power_of_two=False)
    for name, left, right, bf16 in (
        ("forward", rows, plain, lambda: x @ weight.T),
        ("input_gradient", grads, turned, lambda: upstream @ weight),
    ):
        yield name, row_products(left, right, bf16, deepgemm)
    yield "weight_gradient", column_products(grad_columns, columns, lambda: upstream.T @ x, deepgemm)


def row_products(left: Any, right: Any, bf16: Callable[[], Any], deepgemm: Any) -> Candidates:
    yield "torch", lambda: library.multiply_rows(left, right, torch.bfloat16)
    yield "bf16", bf16
    for launch in LAUNCHES:
        yield (
            f"triton {launch}",
            lambda launch=launch: multiply_rows(left, right, None, 1, torch.bfloat16, launch),
        )
    if deepgemm is not None:
        out = torch.empty(left.rows, right.rows, dtype=torch.bfloat16, device="cuda")
        scales = right.scales.T[:, : left.codes.shape[1] // 128].contiguous()

        def run() -> Tensor:
            deepgemm.fp8_gemm_nt((left.codes, left.scales), (right.codes, scales), out)
            return out

        yield "deepgemm", run


def column_products(left: Any, right: Any, bf16: Callable[[], Any], deepgemm: Any) -> Candidates:
    yield "torch", lambda: library.multiply_columns(left, right, torch.bfloat16)
    yield "bf16", bf16
    for launch in LAUNCHES:
        yield (
            f"triton {launch}",
            lambda launch=launch: multiply_columns(left, right, None, 1, torch.bfloat16, launch)[0],
        )
    if deepgemm is not None:
        out = torch.zeros(left.rows, right.rows, device="cuda")
        pairs = (left.codes, left.scales), (right.codes, right.scales)

        def run(total: Tensor | None) -> Tensor:
            deepgemm.fp8_gemm_nt(*pairs, out, c=total, recipe=(1, 1, 128))
            return out

        yield "deepgemm float32", lambda: run(None)
        yield "deepgemm added to float32", lambda: run(out)


def experts(shape: tuple[int, int], deepgemm: Any) -> Iterator[tuple[str, Candidates]]:
    """The shares of experts are multiples of 128, which DeepGEMM needs."""
    outputs, inputs = shape
    shares = torch.randint(1, 8, (COUNT,)) * 128
    ends = shares.cumsum(0, dtype=torch.int32).cuda()
    count = int(shares.sum())
    x, weights, upstream = random(count, inputs), random(COUNT, outputs, inputs), random(count, outputs)
    spans = RowGroups.from_ends(ends, count)
    rows, columns = quantize(x, spans, rows=True, columns=True, power_of_two=False)
    _, grad_columns = quantize(upstream, spans, rows=True, columns=True, power_of_two=False)
    plain, _ = quantize_blocks(weights, power_of_two=False)
    assert rows is not None and columns is not None and plain is not None and grad_columns is not None

    def forward() -> Candidates:
        for launch in LAUNCHES:
            yield (
                f"triton {launch}",
                lambda launch=launch: multiply_rows(rows, plain, spans, COUNT, torch.bfloat16, launch),
            )
        yield "bf16", lambda: grouped_mm(x, weights.transpose(1, 2), offs=ends)
        if deepgemm is not None:
            out = torch.empty(count, outputs, dtype=torch.bfloat16, device="cuda")
            scales = plain.scales.T[:, : inputs // 128].contiguous().view(COUNT, outputs // 128, -1)
            owner = torch.arange(COUNT).repeat_interleave(shares).int().cuda()
            right = plain.codes.view(COUNT, outputs, inputs), scales

            def run() -> Tensor:
                deepgemm.m_grouped_fp8_gemm_nt_contiguous((rows.codes, rows.scales), right, out, owner)
                return out

            yield "deepgemm", run

    def weight_gradient() -> Candidates:
        for launch in LAUNCHES:
            yield (
                f"triton {launch}",
                lambda launch=launch: multiply_columns(
                    grad_columns, columns, spans, COUNT, torch.bfloat16, launch
                ),
            )
        yield "bf16", lambda: grouped_mm(upstream.T, x, offs=ends)

    yield "forward", forward()
    yield "weight_gradient", weight_gradient()
    yield "groups", iter([("from_ends", lambda: RowGroups.from_ends(ends, count).starts)])


def rounding(shape: tuple[int, int], deepgemm: Any) -> Iterator[tuple[str, Candidates]]:
    module = importlib.import_module("rl_kernel.fp8.kernels.quantize")
    x, weight = random(ROWS, shape[1]), random(1, *shape)

    def with_launch(warps: int, registers: int, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            module.WARPS, module.REGISTERS = warps, registers
            call()

        return run

    for name, call in (
        ("rows", lambda: quantize(x, None, rows=True, columns=False, power_of_two=False)),
        ("columns", lambda: quantize(x, None, rows=False, columns=True, power_of_two=False)),
        ("both", lambda: quantize(x, None, rows=True, columns=True, power_of_two=False)),
        ("weights", lambda: quantize_blocks(weight, power_of_two=False)),
    ):
        yield name, iter([(str(pair), with_launch(*pair, call)) for pair in ROUNDING])
    yield "copy", iter([("bf16", x.clone)])


PARTS: dict[str, tuple[Any, dict[str, tuple[int, int]]]] = {
    "rounding": (rounding, LAYERS),
    "dense": (dense, LAYERS),
    "experts": (experts, EXPERTS),
}


def time_of(call: Callable[[], Any], timer: Timer, first: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the result of a call and its time, or the error of a candidate that cannot run here."""
    try:
        result = call()
        found: dict[str, Any] = {"ms": round(timer.median_ms(call), 4)}
    except Exception as error:  # the border of a candidate: the others are still measured
        return None, {"error": f"{type(error).__name__}: {error}"[:300]}
    if isinstance(result, Tensor) and isinstance(first, Tensor):
        found["difference"] = float((result.float() - first.float()).abs().max() / first.float().abs().max())
    return result, found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time candidates for products in fp8.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=tuple(PARTS), action="append")
    parser.add_argument("--deepgemm", action="store_true", help="also DeepGEMM, from the package deep_gemm")
    asked = parser.parse_args()
    deepgemm: Any = importlib.import_module("deep_gemm") if asked.deepgemm else None
    timer, record = Timer("cuda", 7), dict[str, Any]()
    torch.manual_seed(0)
    for part in asked.only or PARTS:
        make, shapes = PARTS[part]
        for layer, shape in shapes.items():
            for name, candidates in make(shape, deepgemm):
                first = None
                for candidate, call in candidates:
                    result, found = time_of(call, timer, first)
                    first = result if first is None else first
                    record[f"{part}/{layer}/{name}/{candidate}"] = found
                    print(f"{layer:16} {name:16} {candidate:50} {found}", flush=True)
            asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
