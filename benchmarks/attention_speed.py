"""Compares the trainer's two kernels of attention on a GPU: flash, and cuDNN (`--attention-backend fused`).

    python benchmarks/attention_speed.py OUT.json                    32 query heads and 8 key heads of 128, bfloat16
    python benchmarks/attention_speed.py OUT.json --device cpu       torch's attention instead, to try the script

A row has the median time of forward and of backward between two events of the device, and the flash time divided by
the cuDNN time. The times of cuDNN include the padding. `first` is the host's time of the first forward and backward,
in which cuDNN builds its graphs: `graphs` for the forward, and as many for the backward. The errors are relative to
float32 (norms of difference and value). Rows of more than 10,000 tokens and runs after a shared prompt are compared
with flash only.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fp8_products import Timer, relative
from operator_bench.machine import describe
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.megatron_backend.model.attention_scores import (
    dense_cudnn,
    fused_attention,
    fused_batches,
    varlen_attention,
)

HEADS, GROUPS, SIZE = 32, 8, 128
MIXED = random.Random(0).choices(range(200, 1801), k=32)
CASES = {
    "2 x 4096": [(0, 4096)] * 2,
    "2 x 4096, shared prompt of 512": [(0, 4096), (512, 4096)],
    "2 x about 4000": [(0, 4001), (0, 3703)],
    "16 x 512": [(0, 512)] * 16,
    "1 x 8192": [(0, 8192)],
    "32 x 988": [(0, 988)] * 32,
    "32 x 200 to 1800": [(0, length) for length in MIXED],
    "1 x 32768": [(0, 32768)],
}
"""Micro-batch -> (first query, end) per run. A run's keys begin at 0."""
LONGEST_CHECK = 10_000
ON_CPU = 32
"""The lengths are divided by this number on a CPU."""

Runs = Sequence[tuple[int, int]]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_torch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def attend_each(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Computes one sequence after the other, with a key head per query head."""
    shared = HEADS // GROUPS
    parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
    outputs = []
    for part in parts:
        one, keys, values = (x.transpose(0, 1)[None] for x in part)
        keys, values = (x.repeat_interleave(shared, dim=1) for x in (keys, values))
        outputs.append(scaled_dot_product_attention(one, keys, values, is_causal=True, scale=SIZE**-0.5)[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def flash(runs: Runs, device: str) -> Attention:
    if device == "cpu":
        return lambda q, k, v: attend_each(q, k, v, [stop for _, stop in runs])
    queries, keys = [stop - start for start, stop in runs], [stop for _, stop in runs]
    bounds = [torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(device) for sizes in (queries, keys)]
    settings = {"scale": SIZE**-0.5, "window_size": (-1, 0)}
    return lambda q, k, v: varlen_attention()(q, k, v, *bounds, max(queries), max(keys), **settings)


def with_gradients(attention: Attention, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Returns the output and the gradients of query, key and value."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def times(attention: Attention, inputs: Sequence[Tensor], upstream: Tensor, timer: Timer) -> dict[str, float]:
    """Returns the medians of forward and backward in ms."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves)
    backward = timer.median_ms(lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True))
    return {"forward": timer.median_ms(lambda: attention(*leaves)), "backward": backward}


def errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> dict[str, float]:
    names = ("out", "d_query", "d_key", "d_value")
    return {name: relative(x, y) for name, x, y in zip(names, found, truth, strict=True)}


def compare(runs: Runs, device: str, timer: Timer) -> dict[str, Any]:
    """Returns a micro-batch's figures."""
    batches, lengths = fused_batches(runs, device), [stop for _, stop in runs]
    queries, total = sum(stop - start for start, stop in runs), sum(lengths)
    if batches is None:
        return {"runs": runs, "padding": "too much for cuDNN: the trainer uses flash"}
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, upstream = (
        torch.randn(rows, heads, SIZE, device=device, generator=generator).bfloat16()
        for rows, heads in ((queries, HEADS), (total, GROUPS), (total, GROUPS), (queries, HEADS))
    )
    kernel = dense_torch if device == "cpu" else dense_cudnn
    attentions: dict[str, Attention] = {
        "flash": flash(runs, device),
        "fused": lambda *x: fused_attention(*x, batches, SIZE**-0.5, kernel),
    }
    values, row = (
        {},
        {
            "lengths": lengths,
            "padded_rows_per_token": sum(n * length for n, length in batches.sizes) / total,
            "graphs": len(set(batches.sizes)),
            "first_s": {},
            "errors": {},
        },
    )
    for name, attention in attentions.items():
        start = time.perf_counter()
        values[name] = with_gradients(attention, (q, k, v), upstream)
        if device != "cpu":
            torch.cuda.synchronize()
        row["first_s"][name] = time.perf_counter() - start
    if queries == total <= LONGEST_CHECK:
        wide = [x.float() for x in (q, k, v)]
        truth = with_gradients(lambda *x: attend_each(*x, lengths), wide, upstream)
        row["errors"] = {name: errors(found, truth) for name, found in values.items()}
    row["fused_against_flash"] = errors(values["fused"], values["flash"])
    row["ms"] = {name: times(f, (q, k, v), upstream, timer) for name, f in attentions.items()}
    row["ratio"] = {
        part: row["ms"]["flash"][part] / row["ms"]["fused"][part] for part in ("forward", "backward")
    }
    return row


def show(name: str, row: dict[str, Any]) -> str:
    """Returns the figures of a case in one line."""
    if "ms" not in row:
        return f"{name} | {row.get('padding') or row['error']}"
    ms = row["ms"]
    parts = (
        f"{part} {ms['flash'][part]:.3f} / {ms['fused'][part]:.3f} ms = {row['ratio'][part]:.2f}"
        for part in row["ratio"]
    )
    compared = {**row["errors"], "fused against flash": row["fused_against_flash"]}
    differences = (
        f"{kind} " + " ".join(f"{name} {error:.1e}" for name, error in found.items())
        for kind, found in compared.items()
    )
    first = row["first_s"]
    return " | ".join(
        (
            name,
            *parts,
            f"padded rows {row['padded_rows_per_token']:.3f} per token",
            f"first {first['flash']:.2f} / {first['fused']:.2f} s, {row['graphs']} graphs",
            *differences,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    cuda = asked.device == "cuda"
    command = ["benchmarks/attention_speed.py", "OUT.json"]
    record: dict[str, Any] = {"machine": describe(torch.device(asked.device), command), "cases": {}}
    record["cudnn"] = torch.backends.cudnn.version()
    timer = Timer(asked.device, asked.repeats)
    print(f"torch {torch.__version__}, cuDNN {record['cudnn']} | flash / cuDNN = ratio", flush=True)
    for name, runs in CASES.items():
        given = runs if cuda else [(0, max(1, stop // ON_CPU)) for _, stop in runs]
        try:
            row = compare(given, asked.device, timer)
        except Exception as error:  # a failed case does not stop the others
            traceback.print_exc()
            row = {"runs": given, "error": f"{type(error).__name__}: {error}"}
        record["cases"][name] = row
        print(show(name, row), flush=True)
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
