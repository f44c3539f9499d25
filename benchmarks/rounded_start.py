"""Measures which part of a small change of the weights remains after rounding to FP8 in blocks or INT4 in groups.

    python benchmarks/rounded_start.py MODEL

MODEL is a Hugging Face folder with plain weights. Each change is random and normal with the given standard deviation.
The rows compare a start from the plain weights with a start from their rounded values in bfloat16, and from these with
--dither-weights. `follows` is the rounded weights' change projected on the change: 1 means that the rounded weights
follow it on average.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

from slime.checkpoints.hf_files import Files
from slime.models.quantized.dither import dither
from slime.models.quantized.quantization import QuantizationScheme, dequantize, quantize

CHANGES = (2e-5, 1e-4, 2.5e-4, 1e-3)
SCHEMES = (
    QuantizationScheme("fp8", "float8_e4m3fn", (128, 128), "float32"),
    QuantizationScheme("compressed-tensors", "int4", (1, 32), "bfloat16"),
)
MATRICES = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how rounded weights follow small changes.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--every", type=int, default=24, help="measure each Nth matrix")
    args = parser.parse_args()
    files = Files(args.model)
    for name in sorted(filter(MATRICES.search, files.names()))[:: args.every]:
        plain = files.get(name)[:].float()
        if plain.shape[0] % 128 or plain.shape[1] % 128:
            continue
        for scheme in SCHEMES:
            rounded = dequantize(quantize(plain, scheme), scheme)
            kind = getattr(torch, scheme.scale_dtype)
            starts = {
                "plain": plain,
                "rounded": rounded.float(),
                "dithered": dither(rounded, scheme, kind, name, (0, 0), plain.shape[1]).float(),
            }
            for size in CHANGES:
                change = torch.randn(plain.shape, generator=torch.Generator().manual_seed(0)) * size
                follows = {key: round(measure_following(x, change, scheme), 3) for key, x in starts.items()}
                row = {"matrix": name, "scheme": scheme.title, "change": size, "follows": follows}
                print(json.dumps(row), flush=True)


def measure_following(start: torch.Tensor, change: torch.Tensor, scheme: QuantizationScheme) -> float:
    """Returns `((round(start + change) - round(start)) * change).sum() / (change * change).sum()`."""
    before, after = (dequantize(quantize(x, scheme), scheme).float() for x in (start, start + change))
    return (((after - before) * change).sum() / (change * change).sum()).item()


if __name__ == "__main__":
    main()
