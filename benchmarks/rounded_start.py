"""Measures which part of a small change of the weights remains after rounding to fp8 in blocks.

    python benchmarks/rounded_start.py MODEL

MODEL is a Hugging Face folder with plain weights. Each change is random and normal with the given standard deviation.
The rows compare a start from the plain weights with a start from their rounded values in bfloat16. `follows` is the
rounded weights' change projected on the change: 1 means that the rounded weights follow it on average.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

from rl_kernel.fp8.reference import quantize_blocks
from slime.checkpoints.hf_files import Files

CHANGES = (2e-5, 1e-4, 2.5e-4, 1e-3)
MATRICES = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how rounded weights follow small changes.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--every", type=int, default=24, help="measure each Nth matrix")
    args = parser.parse_args()
    files = Files(args.model)
    for name in sorted(filter(MATRICES.search, files.names()))[:: args.every]:
        weight = files.get(name)[:].float()
        if weight.shape[0] % 128 or weight.shape[1] % 128:
            continue
        starts = {"plain": weight, "rounded": round_to_fp8(weight).bfloat16().float()}
        for size in CHANGES:
            change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * size
            follows = {start: round(measure_following(values, change), 3) for start, values in starts.items()}
            print(json.dumps({"matrix": name, "change": size, "follows": follows}), flush=True)


def round_to_fp8(weight: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_blocks(weight)
    return codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def measure_following(start: torch.Tensor, change: torch.Tensor) -> float:
    """Returns `((round(start + change) - round(start)) * change).sum() / (change * change).sum()`."""
    moved = round_to_fp8(start + change) - round_to_fp8(start)
    return ((moved * change).sum() / (change * change).sum()).item()


if __name__ == "__main__":
    main()
