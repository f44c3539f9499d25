"""Measures runs of an agent with long histories at several --flush-cache-interval.

    python benchmarks/caches/cache_speed.py --out cache_speed_cpu.json
    python benchmarks/caches/cache_speed.py --intervals 1,never --rollouts 4          a short trial
    python benchmarks/caches/cache_speed.py --show cache_speed_cpu.json               the table of a record

The runs use a tiny model, with one engine and one trainer rank on the same cores, and rollouts ahead of training
(--max-staleness). A history has at most --history tokens, of which the model writes half (histories.py). The runs of a
seed take turns. The first two rollouts of a run do not count: tokens per second are the tokens of the other rollouts'
histories, divided by the time from the end of the second step to the end of the last step. The reward is the mean of
the last three rollouts. engine_histories.py measures an engine alone, whose histories all outlive updates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from operator_bench.machine import describe  # noqa: E402

PROMPTS, ANSWERS, WARM_UP = 8, 2, 2
CONTEXT = 8192
"""Context of the tiny model here, whose own is 1,024 tokens."""
HIT, AGE, OLDEST = "prefix_cache_hit_rate", "prefix_cache_age/mean", "prefix_cache_age/max"
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def command(args: argparse.Namespace, run_dir: Path, interval: str, seed: int) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "vime", "train", "--device", "cpu", "--rollout-num-gpus", "1"),
        *("--hf-checkpoint", str(args.tiny / "base"), "--prompt-data", str(args.tiny / "train.jsonl")),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--custom-generate-function-path", "histories.generate"),
        *("--custom-rm-path", "histories.odd_share"),
        *("--num-rollout", str(args.rollouts), "--rollout-batch-size", str(PROMPTS)),
        *("--n-samples-per-prompt", str(ANSWERS), "--rollout-max-response-len", str(args.history)),
        *("--num-steps-per-rollout", "1", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", str(args.history + 1024)),
        *("--actor-num-gpus-per-node", "1", "--lr", "1e-3", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--use-tis", "--max-staleness", str(args.staleness), "--flush-cache-interval", interval),
        *("--vllm-kv-cache-memory-bytes", str(args.cache_mib << 20)),
        *("--seed", str(seed), "--rollout-seed", str(seed), "--run-dir", str(run_dir)),
    ]


def measure(args: argparse.Namespace, run_dir: Path, interval: str, seed: int) -> dict[str, Any]:
    """Makes one run, and returns its figures."""
    run_dir.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])}
    with (run_dir / "output.log").open("w", encoding="utf-8") as log:
        line = command(args, run_dir, interval, seed)
        subprocess.run(line, check=True, stdout=log, stderr=log, env=environment)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    everything = [json.loads(line) for line in lines]
    rows = [row for row in everything if "perf/step_time" in row]
    counted = rows[WARM_UP:]
    tokens = sum(row["rollout/response_len/mean"] * PROMPTS * ANSWERS for row in counted)
    seconds = rows[-1]["time"] - rows[WARM_UP - 1]["time"]

    def mean(name: str) -> float:
        found = [row[name] for row in everything if name in row]
        return statistics.mean(found[WARM_UP:]) if found[WARM_UP:] else 0.0

    return {
        "interval": interval,
        "seed": seed,
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "hit_rate": mean(f"rollout/{HIT}"),
        "age": mean(f"rollout/{AGE}"),
        "oldest": max(row.get(f"rollout/{OLDEST}", 0.0) for row in counted),
        "staleness": mean("rollout/staleness/token_mean"),
        "difference": mean(DIFFERENCE),
        "reward": statistics.mean(row["rollout/raw_reward"] for row in rows[-3:]),
        "rewards": [row["rollout/raw_reward"] for row in rows],
    }


def table(record: dict[str, Any]) -> str:
    """Returns a table with one row per interval: means over the seeds, and ratios to interval 1 of the same seed."""
    runs = record["runs"]
    base = {run["seed"]: run["tokens_per_s"] for run in runs if run["interval"] == "1"}
    lines = [
        f"{'interval':>8} {'tokens/s':>9} {'ratio, each seed':>18} {'hit rate':>8} {'age':>5} {'oldest':>6} "
        f"{'staleness':>9} {'log-prob diff':>13} {'reward, each seed':>18}"
    ]
    for interval in dict.fromkeys(run["interval"] for run in runs):
        found = [run for run in runs if run["interval"] == interval]

        def mean(name: str, found: list[dict[str, Any]] = found) -> float:
            return statistics.mean(run[name] for run in found)

        ratios = " ".join(
            f"{run['tokens_per_s'] / base[run['seed']]:.2f}" for run in found if run["seed"] in base
        )
        rewards = " ".join(f"{run['reward']:.3f}" for run in found)
        lines.append(
            f"{interval:>8} {mean('tokens_per_s'):>9.0f} {ratios:>18} {mean('hit_rate'):>8.3f} {mean('age'):>5.2f} "
            f"{max(run['oldest'] for run in found):>6.0f} {mean('staleness'):>9.2f} {mean('difference'):>13.4f} "
            f"{rewards:>18}"
        )
    return "\n".join(lines)


def make_tiny(folder: Path) -> Path:
    """Returns the folder of a tiny model and its prompts, made once."""
    tiny = folder / "tiny"
    if not (tiny / "base").is_dir():
        script = str(REPOSITORY / "scripts" / "make_tiny_model.py")
        subprocess.run([sys.executable, script, str(tiny)], check=True)
        file = tiny / "base" / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
    return tiny


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Speed, cache hits and reward at several --flush-cache-interval."
    )
    parser.add_argument("--intervals", default="1,2,4,never")
    parser.add_argument("--history", type=int, default=2000, help="tokens of a history, without its prompt")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--cache-mib", type=int, default=512)
    parser.add_argument("--work", type=Path, default=Path("runs/cache_speed"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="")
    parser.add_argument("--show", type=Path, help="print the table of this record and measure nothing")
    args = parser.parse_args(argv)
    if args.show:
        print(table(json.loads(args.show.read_text(encoding="utf-8"))["measured"]))
        return
    args.tiny = make_tiny(args.work)
    machine = describe(
        torch.device("cpu"), ["benchmarks/caches/cache_speed.py", *(sys.argv[1:] if argv is None else argv)]
    )
    record: dict[str, Any] = {"machine": machine, "note": args.note, "history": args.history}
    record |= {
        "prompts": PROMPTS,
        "answers": ANSWERS,
        "max_staleness": args.staleness,
        "rollouts": args.rollouts,
    }
    runs: list[dict[str, Any]] = []
    record["measured"] = {"runs": runs}
    for seed in range(args.seeds):
        for interval in args.intervals.split(","):
            run = measure(args, args.work / f"interval-{interval}-seed-{seed}", interval, seed)
            runs.append(run)
            print({name: value for name, value in run.items() if name != "rewards"}, flush=True)
            if args.out:
                args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record["measured"]))


if __name__ == "__main__":
    main()
