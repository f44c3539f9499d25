"""Measures an engine alone whose agents have long histories, with one update of the weights after each turn.

    python benchmarks/caches/engine_histories.py --out engine_histories_cpu.json

A tiny random model on CPUs serves --agents agents at the same time. A turn is a request with the whole history: the
model writes 16 tokens, and the agent adds 240. All agents wait while the weights change, as they do during a call of a
tool. The intervals of --flush-cache-interval share the engine and take turns. Tokens per second are the tokens that the
histories gain, divided by the seconds of the requests, without the updates. `computed` is the number of prompt tokens
that the engine computed, per token that was written.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/slime"), str(ROOT / "benchmarks")]

from engine_fixtures import Stack  # noqa: E402
from operator_bench.machine import describe  # noqa: E402

WRITES, READS, CONTEXT = 16, 240, 8192


def measure(stack: Stack, interval: int | None, agents: int, turns: int, seed: int) -> dict[str, Any]:
    """Plays all turns of all agents at one interval. None: the caches stay over all updates."""
    stack.pool._transfer._flush_interval, stack.pool._transfer._updates = interval, 0
    stack.push(stack.checkpoint, checksums=False)
    drawn = random.Random(seed)
    histories = [[drawn.randint(4, 40) for _ in range(64)] for _ in range(agents)]
    seconds, prompts, cached, ages = 0.0, 0, 0, list[int]()
    for turn in range(turns):
        began = time.perf_counter()
        results = stack.generate_all(
            histories, seed=seed + turn, deadline_s=600, max_new_tokens=WRITES, ignore_eos=True
        )
        seconds += time.perf_counter() - began
        for history, result in zip(histories, results, strict=True):
            prompts += len(history)
            cached += result.cached_tokens
            ages.append(result.cache_ages[1])
            history += [*result.token_ids, *(drawn.randint(4, 40) for _ in range(READS))]
        stack.push(stack.other if turn % 2 else stack.checkpoint, checksums=False)
    written = agents * turns * WRITES
    return {
        "interval": "never" if interval is None else str(interval),
        "tokens_per_s": agents * turns * (WRITES + READS) / seconds,
        "hit_rate": cached / prompts,
        "computed": (prompts - cached) / written,
        "oldest": max(ages),
        "seconds": seconds,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns one line per interval: medians over the rounds."""
    lines = [f"{'interval':>8} {'tokens/s':>9} {'hit rate':>8} {'computed':>8} {'oldest':>6}"]
    for interval in dict.fromkeys(row["interval"] for row in rows):
        found = [row for row in rows if row["interval"] == interval]
        speed, hits, computed = (
            statistics.median(row[name] for row in found) for name in ("tokens_per_s", "hit_rate", "computed")
        )
        oldest = max(row["oldest"] for row in found)
        lines.append(f"{interval:>8} {speed:>9.0f} {hits:>8.3f} {computed:>8.1f} {oldest:>6}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="An engine's histories over updates of the weights.")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="")
    parser.add_argument("--show", type=Path, help="print the table of this record and measure nothing")
    args = parser.parse_args()
    if args.show:
        print(table(json.loads(args.show.read_text(encoding="utf-8"))["measured"]["engine"]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        for checkpoint in (stack.checkpoint, stack.other):
            file = checkpoint / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
        stack.pool.start()
        try:
            measure(stack, 1, args.agents, 2, seed=99)  # warm-up
            for number in range(args.rounds):
                for interval in (1, 2, 4, None):
                    rows.append(measure(stack, interval, args.agents, args.turns, seed=number))
                    print(rows[-1], flush=True)
        finally:
            stack.pool.stop()
    print(table(rows))
    if args.out:
        command = ["benchmarks/caches/engine_histories.py", *sys.argv[1:]]
        record = {"machine": describe(torch.device("cpu"), command), "note": args.note}
        record |= {"measured": {"engine": rows}}
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
