"""Measures rollouts ahead under a heavy tail of lengths: tokens per second and reward at several --max-staleness.

    python benchmarks/stream_speed.py --out stream_cpu.json
    python benchmarks/stream_speed.py --staleness 0,1 --seeds 1 --rollouts 8        a short trial
    python benchmarks/stream_speed.py --tis --rollouts 100 --out rewards.json      final rewards of older samples
    python benchmarks/stream_speed.py --show stream_cpu.json                        the table of a record

The runs use a tiny model, with one engine and one trainer rank on the same cores. The lengths of responses are
log-normal, with p99 at 20 times the median (examples/bench/lengths.py). The reward is the share of odd token ids. The
runs of a seed take turns. The first two rollouts of a run do not count: tokens per second are the response tokens of
the other rollouts, divided by the time from the end of the second step to the end of the last step.

`idle` is the share of this time in which engine, manager and trainer were idle; stream_picture.py draws it.

`bound` is the speed of the same queue in a simulation. Each token takes the time that it took in the run of staleness
0, for any load, and training takes the same time as in this run.

With --tis, the trainer computes the old log-probs, and --use-tis corrects for the weights that sampled each token. The
table then has rewards: the mean of the last ten rollouts, and the first rollout above 0.9.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from operator_bench.machine import describe
from stream_picture import PARTS, idle_shares

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "examples" / "bench"))
from lengths import length_of  # noqa: E402

PROMPTS, ANSWERS, LIMIT, WARM_UP = 16, 4, 768, 2
LAST, GOAL = 10, 0.9
"""With --tis: number of last rollouts whose mean is the final reward, and the reward whose first rollout is listed."""


def command(
    tiny: Path, run_dir: Path, staleness: int, seed: int, rollouts: int, *, tis: bool = False
) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "vime", "train", "--device", "cpu", "--rollout-num-gpus", "1"),
        *("--hf-checkpoint", str(tiny / "base"), "--prompt-data", str(tiny / "train.jsonl")),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--custom-generate-function-path", "lengths.generate", "--custom-rm-path", "untrained.odd_share"),
        *("--num-rollout", str(rollouts), "--rollout-batch-size", str(PROMPTS)),
        *("--n-samples-per-prompt", str(ANSWERS), "--rollout-max-response-len", str(LIMIT)),
        *("--num-steps-per-rollout", "1", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
        *("--actor-num-gpus-per-node", "1", "--lr", "1e-3", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--use-tis" if tis else "--use-rollout-logprobs", "--max-staleness", str(staleness)),
        *("--seed", str(seed)),
        *("--rollout-seed", str(seed), "--run-dir", str(run_dir)),
    ]


def measure(
    tiny: Path, run_dir: Path, staleness: int, seed: int, rollouts: int, *, tis: bool
) -> dict[str, Any]:
    """Makes one run. Returns tokens per second, seconds of the parts of a step, and rewards."""
    run_dir.mkdir(parents=True)
    paths = [str(REPOSITORY), str(REPOSITORY / "examples" / "bench")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (run_dir / "output.log").open("w", encoding="utf-8") as log:
        subprocess.run(
            command(tiny, run_dir, staleness, seed, rollouts, tis=tis),
            check=True,
            stdout=log,
            stderr=log,
            env=environment,
        )
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/step_time" in row]
    counted = rows[WARM_UP:]
    tokens = sum(row["rollout/response_len/mean"] * PROMPTS * ANSWERS for row in counted)
    names = ("step", "train_wait", "train", "update_weights")
    return {
        "staleness": staleness,
        "seed": seed,
        "tokens_per_s": tokens / (rows[-1]["time"] - rows[WARM_UP - 1]["time"]),
        "tokens": tokens,
        "parts_s": {name: statistics.mean(row[f"perf/{name}_time"] for row in counted) for name in names},
        "age": statistics.mean(row.get("rollout/staleness/mean", 0.0) for row in counted),
        "oldest": max(row.get("rollout/staleness/max", 0.0) for row in counted),
        "idle": idle_shares(run_dir, WARM_UP),
        "reward": statistics.mean(row["rollout/raw_reward"] for row in rows[-3:]),
        "rewards": [row["rollout/raw_reward"] for row in rows],
    }


def bound(staleness: int, rollouts: int, token_s: float, train_s: float) -> float:
    """Returns the tokens per second of the simulated queue."""
    groups = [
        [length_of(group * ANSWERS + i, LIMIT) for i in range(ANSWERS)] for group in range(rollouts * PROMPTS)
    ]
    running: list[tuple[float, int, int]] = []  # end, group, weights at its start
    ready: list[tuple[int, int]] = []
    drawn, now, trained = 0, 0.0, 0
    ends: list[float] = []
    tokens: list[int] = []
    while trained < rollouts:
        while drawn < min(len(groups), (trained + staleness + 1) * PROMPTS):
            heapq.heappush(running, (now + token_s * max(groups[drawn]), drawn, trained))
            drawn += 1
        must = [end for end, _, version in running if version <= trained - staleness]
        while len(ready) < PROMPTS or must:
            end, group, version = heapq.heappop(running)
            now = max(now, end)
            ready.append((version, group))
            must = [other for other, _, start in running if start <= trained - staleness]
        ready.sort(key=lambda one: one[0] > trained - staleness)
        batch, ready = ready[:PROMPTS], ready[PROMPTS:]
        now += train_s
        while running and running[0][0] <= now:
            _, group, version = heapq.heappop(running)
            ready.append((version, group))
        trained += 1
        ends.append(now)
        tokens.append(sum(sum(groups[group]) for _, group in batch))
    return sum(tokens[WARM_UP:]) / (ends[-1] - ends[WARM_UP - 1])


def table(record: dict[str, Any]) -> str:
    """Returns a table with one row per staleness, and ratios to staleness 0 of the same seed."""
    runs, lines = record["runs"], []
    base = {run["seed"]: run["tokens_per_s"] for run in runs if run["staleness"] == 0}
    lines.append(
        f"{'staleness':>9} {'tokens/s':>9} {'ratio, each seed':>24} {'bound':>6} {'age':>5} {'oldest':>6}"
        f" {'waits':>6} {'trains':>6} {'reward, each seed':>24}"
    )
    for staleness in sorted({run["staleness"] for run in runs}):
        found = [run for run in runs if run["staleness"] == staleness]
        mean = {
            name: statistics.mean(run[name] for run in found) for name in ("tokens_per_s", "age", "reward")
        }
        parts = {
            name: statistics.mean(run["parts_s"][name] for run in found) for name in ("train_wait", "train")
        }
        ratios = " ".join(f"{run['tokens_per_s'] / base[run['seed']]:.2f}" for run in found)
        rewards = " ".join(f"{run['reward']:.3f}" for run in found)
        lines.append(
            f"{staleness:>9} {mean['tokens_per_s']:>9.0f} {ratios:>24} {record['bounds'][str(staleness)]:>6.2f}"
            f" {mean['age']:>5.2f} {max(run['oldest'] for run in found):>6.0f} {parts['train_wait']:>5.2f}s"
            f" {parts['train']:>5.2f}s {rewards:>24}"
        )
    return "\n".join([*lines, *idle_lines(runs)])


def idle_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one line per staleness of a record with idle times."""
    lines = []
    for staleness in sorted({run["staleness"] for run in runs if "idle" in run}):
        found = [run["idle"] for run in runs if run["staleness"] == staleness]
        shares = (f"{part} {100 * statistics.mean(idle[part] for idle in found):.0f}%" for part in PARTS)
        lines.append(f"idle at staleness {staleness}: {', '.join(shares)}")
    return lines


def reward_table(record: dict[str, Any]) -> str:
    """Returns a table with one row per staleness of a record with --tis."""
    runs = record["runs"]
    lines = [
        f"{'staleness':>9} {'final reward, each seed':>26} {'mean':>6} {'rollout above ' + str(GOAL):>20}"
    ]
    for staleness in sorted({run["staleness"] for run in runs}):
        curves = [run["rewards"] for run in runs if run["staleness"] == staleness]
        finals = [statistics.mean(curve[-LAST:]) for curve in curves]
        firsts = [next((i for i, reward in enumerate(curve) if reward > GOAL), None) for curve in curves]
        lines.append(
            f"{staleness:>9} {' '.join(f'{final:.4f}' for final in finals):>26} {statistics.mean(finals):>6.4f}"
            f" {' '.join('never' if first is None else str(first) for first in firsts):>20}"
        )
    return "\n".join(lines)


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", default="0,1,4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--work", type=Path, default=Path("runs/stream_speed"), help="a new folder")
    parser.add_argument("--tis", action="store_true", help="correct for older weights, and compare rewards")
    parser.add_argument("--note", default="", help="what else ran on the machine, for the record")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print the table of a record, and run nothing"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = arguments_of(argv)
    if arguments.show:
        record = json.loads(arguments.show.read_text(encoding="utf-8"))
        print(reward_table(record) if record.get("tis") else table(record))
        return 0
    levels = [int(level) for level in arguments.staleness.split(",")]
    if 0 not in levels or arguments.rollouts <= WARM_UP:
        print(
            f"stream_speed: --staleness must include 0 and --rollouts be above {WARM_UP}, got "
            f"{arguments.staleness} and {arguments.rollouts}; the ratios are to staleness 0",
            file=sys.stderr,
        )
        return 2
    work = arguments.work.resolve()
    if not (work / "tiny" / "base" / "config.json").is_file():
        script = REPOSITORY / "scripts" / "make_tiny_model.py"
        subprocess.run([sys.executable, str(script), str(work / "tiny")], check=True)
    runs = []
    for seed in range(arguments.seeds):
        for staleness in levels if seed % 2 == 0 else reversed(levels):
            folder = work / f"staleness-{staleness}-seed-{seed}"
            made = measure(work / "tiny", folder, staleness, seed, arguments.rollouts, tis=arguments.tis)
            runs.append(made)
            print(json.dumps(runs[-1]), flush=True)
    waits = [run["parts_s"] for run in runs if run["staleness"] == 0]
    longest = statistics.mean(
        max(length_of(i, LIMIT) for i in range(first, first + PROMPTS * ANSWERS))
        for first in range(
            WARM_UP * PROMPTS * ANSWERS, arguments.rollouts * PROMPTS * ANSWERS, PROMPTS * ANSWERS
        )
    )
    token_s = statistics.mean(parts["train_wait"] for parts in waits) / longest
    train_s = statistics.mean(parts["step"] - parts["train_wait"] for parts in waits)
    bounds = {level: bound(level, arguments.rollouts, token_s, train_s) for level in levels}
    record = {
        "machine": describe(torch.device("cpu"), ["benchmarks/stream_speed.py", *argv], None),
        "note": arguments.note,
        "tis": arguments.tis,
        "prompts": PROMPTS,
        "answers": ANSWERS,
        "token_s": token_s,
        "train_s": train_s,
        "bounds": {str(level): value / bounds[0] for level, value in bounds.items()},
        "runs": runs,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(reward_table(record) if record["tis"] else table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
