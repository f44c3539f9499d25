"""Compares the product of rl_kernel.invariant with cuBLAS: times and bits.

    python benchmarks/invariant_products.py OUT.json                all models, 16 to 8,192 rows, in bfloat16
    python benchmarks/invariant_products.py OUT.json --every-tile   each tile too, and whether its bits differ

The script measures, for each model, the four products of a layer. A time is for one product in a CUDA graph of
several products, whose weights together do not fit into the cache. It is from the second of three runs. For each number
of rows, the table has the time of the four products divided by cuBLAS' time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_kernel.invariant.kernels import product

LAYERS = {
    "Qwen3-4B": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
    "Qwen3-0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "SmolLM2-135M": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
}
"""Model -> product -> outputs and inputs."""
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
CACHE_BYTES = 150_000_000
"""Bytes of weights in a graph: more than the second-level cache of an H200 (50 MB)."""


def microseconds(call: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Returns the microseconds per call, in a graph with one call per weight."""
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return sorted(times)[1]


def compared(outputs: int, inputs: int, rows: int, every: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    copies = max(8, min(24, CACHE_BYTES // (outputs * inputs * 2) + 1))
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, weights = make(rows, inputs), [make(outputs, inputs) / inputs**0.5 for _ in range(copies)]
    out = make(rows, outputs)
    tile = product.choose_tile(rows, outputs, torch.cuda.get_device_properties(0).multi_processor_count)
    ours = product.linear(x, weights[0], None)
    found = {
        "cublas_us": microseconds(lambda w: torch.mm(x, w.t(), out=out), weights),
        "us": microseconds(lambda w: product.linear(x, w, None), weights),
        "tile": list(tile),
        "cublas_has_the_same_bits": torch.equal(torch.mm(x, weights[0].t()), ours),
    }
    if every:
        tiles = {
            str(tuple(t)): microseconds(lambda w, t=t: product.linear(x, w, None, t), weights)
            for t in product.TILES
        }
        same = all(torch.equal(product.linear(x, weights[0], None, t), ours) for t in product.TILES)
        found |= {"tiles_us": tiles, "all_tiles_same_bits": same}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the invariant product with cuBLAS.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--every-tile", action="store_true")
    asked = parser.parse_args()
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": {},
    }
    print("rows | " + " | ".join(LAYERS))
    for rows in asked.rows:
        ratios = []
        for model, layer in LAYERS.items():
            found = {name: compared(*shape, rows, asked.every_tile) for name, shape in layer.items()}
            record["layers"].setdefault(model, {})[rows] = found
            ratios.append(
                sum(one["us"] for one in found.values()) / sum(one["cublas_us"] for one in found.values())
            )
        print(f"{rows} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios), flush=True)
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
