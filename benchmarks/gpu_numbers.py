"""Compares the figures of GPU runs with their targets in one table: `python benchmarks/gpu_numbers.py PATH...`

A PATH is a run directory, or a JSON file of `operator_bench --out`, of `rollout_speed.py --out`, or of any program
that writes {"figures": {"NAME": number}} with a NAME of FIGURES below. A target without a figure is shown as "not
measured". A run counts only for targets that fit its flags and its model's size. For the share of the host link, such
a file may have the speeds of the link instead, under the names of LINK.

Times are medians over the steps after the first step, which compiles. A run directory may have gpu_memory.csv, which
`nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv,noheader,nounits -lms 500` writes during the run.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from gpu_runs import GpuRun, Sources, read

from slime.hardware import HARDWARE
from slime.plan.flops import ForwardFlops

PEAK_TFLOPS = {device: gpu.bf16_flops / 1e12 for gpu in HARDWARE.values() for device in gpu.devices}
"""Name of a GPU in the driver -> peak of dense bfloat16 products, in TFLOP/s."""
IDLE_MIB = 1024
"""A GPU with at most this number of MiB in use does not belong to the run."""
RISE = 0.1
MICRO_BATCHES = (16_384, 32_768)
LINK = {"offload": "link_offload_gib_per_s", "onload": "link_onload_gib_per_s"}
"""Direction -> figure with the speed of plain copies of page-locked memory, from the GPU to the host and back."""

Found = Iterator[tuple[float, str]]
"""(value, source of the value)"""


def _times(
    fits: Callable[[GpuRun], bool], *metrics: str, where_present: Sequence[str] = ()
) -> Callable[[Sources], Found]:
    def find(sources: Sources) -> Found:
        for run in sources.large():
            if fits(run) and (value := run.median(*metrics, where_present=where_present)) is not None:
                yield value, run.series.name

    return find


def _tp2_to_tp1(run: GpuRun) -> bool:
    """Returns whether the run updates TP 1 engines from a TP 2 trainer. With two GPUs, both share the GPUs."""
    return (run.flags["tensor_model_parallel_size"], run.flags["rollout_num_gpus_per_engine"]) == (2, 1)


def _colocated(run: GpuRun) -> bool:
    return run.flags["colocate"] and not _tp2_to_tp1(run)


def _disaggregated(run: GpuRun) -> bool:
    return not run.flags["colocate"] and not _tp2_to_tp1(run)


def _rollout(against: str) -> Callable[[Sources], Found]:
    def find(sources: Sources) -> Found:
        for name, content in sources.files:
            if (
                against in content.get("ours_to", {})
                and content["requests"] == 256
                and content["engine"] == "vllm"
            ):
                yield content["ours_to"][against], name

    return find


def _mfu(sources: Sources) -> Found:
    """Yields the model FLOPs utilisation for GPUs in PEAK_TFLOPS. The FLOPs are one forward plus a backward of two
    forwards through the layers, without the head, for samples of the mean length. This is a lower bound, because
    attention grows with the square."""
    for run in sources.large():
        if run.gpu not in PEAK_TFLOPS:
            continue
        speed, seconds = run.median("perf/actor_train_tok_per_s"), run.median("perf/actor_train_time")
        if speed is None or seconds is None or not run.flags["use_dynamic_batch_size"]:
            continue
        if MICRO_BATCHES[0] <= run.flags["max_tokens_per_gpu"] <= MICRO_BATCHES[1]:
            length = speed * seconds / run.samples
            flops = 3 * run.samples * ForwardFlops(run.model)(length, 0)
            yield flops / seconds / run.trainers / 1e12 / PEAK_TFLOPS[run.gpu], run.series.name


def _loss_part(sources: Sources) -> Found:
    """Yields the time of the loss part divided by the time of operator_bench for the same number of tokens, width and
    vocabulary. It uses their largest cases on the same GPU, for one trainer and the one-pass head."""
    bench: dict[tuple[Any, ...], tuple[int, float]] = {}
    for _, content in sources.files:
        for case in content.get("linear", []):
            shape, gpu = case["case"], content["machine"]["gpu"]
            for row in case["rows"]:
                if row["name"] == "linear_token_loss 1.5GiB bf16 main_grad grpo_loss" and row.get("ms"):
                    key = gpu, shape["hidden"], shape["vocab"]
                    best = max(bench.get(key, (0, 0.0)), (shape["tokens"], row["ms"]["median"]))
                    bench[key] = best
    for run in sources.large():
        key = run.gpu, run.model["hidden_size"], run.model["vocab_size"]
        seconds, length = run.median("perf/policy_loss_time"), run.median("rollout/response_len/mean")
        if key in bench and seconds is not None and length is not None and run.trainers == 1:
            tokens, ms = bench[key]
            yield seconds / (run.samples * length * ms / tokens / 1e3), run.series.name


def _memory_growth(sources: Sources) -> Found:
    """Yields the largest memory during step 10 divided by the largest memory during step 3, minus 1, of the GPU with
    the largest growth. Without a record from step 3 on, there is no value."""
    for run in sources.runs:
        file = run.path / "gpu_memory.csv"
        if not file.exists():
            continue
        with open(file, encoding="utf-8") as lines:
            rows = [row for row in csv.reader(lines, skipinitialspace=True) if len(row) == 3]
        ends, growth = run.step_ends, list[float]()
        for gpu in {row[1] for row in rows}:
            used = [
                (datetime.strptime(row[0], "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(row[2]))
                for row in rows
                if row[1] == gpu
            ]
            third, tenth = (
                [mib for time, mib in used if ends.get(step - 1, np.inf) < time <= ends.get(step, -np.inf)]
                for step in (3, 10)
            )
            if used[0][0] <= ends.get(2, -np.inf) and tenth and max(third, default=0.0) > IDLE_MIB:
                growth.append(max(tenth) / max(third) - 1)
        if growth:
            yield max(growth), run.series.name


def _curves_that_rise(sources: Sources) -> Found:
    """Yields the number of runs, colocated and disaggregated with rl_kernel off and auto, whose last three rollouts are
    better than their first three by RISE."""
    risen = set()
    for run in sources.runs:
        reward = run.series.series.get("rollout/raw_reward")
        if reward is not None and len(reward.values) >= 6:
            gain = reward.values[-3:].mean() - reward.values[:3].mean()
            if gain > RISE and run.flags["rlk_fast"] in ("off", "auto"):
                risen.add((run.flags["colocate"], run.flags["rlk_fast"]))
    if risen:
        yield len(risen), "learning curves"


def _audit(sources: Sources) -> Found:
    """Yields the change of the mean |trainer - engine| of the first rollout between off and auto, divided by the mean
    |difference| of the trainer's log-probs between batch layouts (`vime audit`). It is infinite if the divisor is 0."""
    by_mode: dict[bool, dict[str, GpuRun]] = {}
    for run in sources.runs:
        if "consistency/abs_dlogp_mean" in run.series.series:
            by_mode.setdefault(run.flags["colocate"], {})[run.flags["rlk_fast"]] = run
    for runs in by_mode.values():
        noise = _layout_noise(pair for run in runs.values() for pair in _audited(run.path))
        if {"off", "auto"} <= runs.keys() and noise is not None:
            moved = runs["auto"].first("consistency/abs_dlogp_mean") - runs["off"].first(
                "consistency/abs_dlogp_mean"
            )
            yield _by_noise(moved, noise), f"{runs['off'].series.name}, {runs['auto'].series.name}"
    for name, content in sources.files:
        if "rlk_fast" in content and (noise := _layout_noise(content.get("pairs", ()))) is not None:
            off, auto = (content["rlk_fast"][side][0]["abs_dlogp_mean"] for side in ("off", "auto"))
            yield _by_noise(auto - off, noise), name


def _by_noise(moved: float, noise: float) -> float:
    return abs(moved) / noise if noise else math.inf if moved else 0.0


def _audited(path: Path) -> Iterator[dict[str, Any]]:
    for file in (path / "audit").glob("rollout_*.json"):
        yield from json.loads(file.read_text(encoding="utf-8"))["pairs"]


def _layout_noise(pairs: Iterable[dict[str, Any]]) -> float | None:
    """Returns the largest mean difference between the trainer's training rows and other layouts, in nats. None without
    an audit."""
    layouts = [
        p["mean"] for p in pairs if all(p[which].startswith("trainer, ") for which in ("first", "second"))
    ]
    return max(layouts, default=None)


@dataclass(frozen=True)
class Target:
    """One target. `figure` is its name in a file of {"figures": ...}. `above` is true if more is better."""

    figure: str
    what: str
    limit: float
    unit: str
    find: Callable[[Sources], Found]
    above: bool = False


def _link_share(sources: Sources) -> Found:
    """Yields the bandwidth of the slower direction divided by the link's bandwidth from a file of the same machine."""
    given: dict[str, float] = {}
    for _, content in sources.files:
        given |= content.get("figures", {})
    for run in sources.large():
        shares = [
            speed / given[link]
            for way, link in LINK.items()
            if link in given and (speed := run.median(f"perf/{way}_gib_per_s")) is not None
        ]
        if len(shares) == len(LINK):
            yield min(shares), run.series.name


_UPDATE = "perf/update_weights_time"
_HAND_OVER = ("perf/sleep_time", "perf/wake_up_time", _UPDATE)
_OUT_AND_BACK = ("perf/offload_time", "perf/onload_time")
FIGURES = (
    Target("sync_colocated_s", "weights to engines, colocated", 0.4, "s", _times(_colocated, _UPDATE)),
    Target(
        "sync_disaggregated_s",
        "weights to engines, disaggregated",
        0.35,
        "s",
        _times(_disaggregated, _UPDATE),
    ),
    Target("sync_tp2_tp1_s", "weights to engines, TP 2 to TP 1", 0.5, "s", _times(_tp2_to_tp1, _UPDATE)),
    Target("hand_over_s", "hand-over: sleep, wake, weights", 0.8, "s", _times(_colocated, *_HAND_OVER)),
    Target("rollout_share", "rollout / raw vLLM, 256 requests", 0.9, "x", _rollout("raw"), above=True),
    Target(
        "rollout_share_log_probs",
        "rollout / raw vLLM with log-probs",
        0.9,
        "x",
        _rollout("raw, log-probs"),
        above=True,
    ),
    Target("mfu", "training, model FLOPs / 989 TFLOP/s", 0.4, "x", _mfu, above=True),
    Target("loss_part", "log-probs and loss / operator_bench", 1.15, "x", _loss_part),
    # The parameters are offloaded while weights are published. The seconds of the hand-over include this time, too.
    Target(
        "offload_s",
        "trainer's state out and back",
        6.0,
        "s",
        _times(_colocated, *_OUT_AND_BACK, where_present=("perf/weights_offload_time",)),
    ),
    Target("offload_link_share", "that state's bandwidth / host link's", 0.8, "x", _link_share, above=True),
    Target("memory_growth", "GPU memory, step 10 / step 3 - 1", 0.01, "", _memory_growth),
    Target("curves", "learning runs whose reward rises, of 4", 4, "", _curves_that_rise, above=True),
    Target("audit", "kernels on / off, by batch-layout noise", 1.0, "x", _audit),
)


def rows(sources: Sources) -> list[tuple[Target, float | None, str]]:
    """Returns (target, value, source) rows: one row per source with the value, and at least one row per target.
    ValueError for a figure without a target."""
    known = {target.figure for target in FIGURES} | {*LINK.values()}
    for name, content in sources.files:
        if unknown := content.get("figures", {}).keys() - known:
            raise ValueError(
                f"figures of {name} must be of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}"
            )
    found = []
    for target in FIGURES:
        values = list(target.find(sources))
        values += [
            (content["figures"][target.figure], name)
            for name, content in sources.files
            if target.figure in content.get("figures", {})
        ]
        found += [(target, value, source) for value, source in values] or [(target, None, "")]
    return found


def verdict(target: Target, value: float | None) -> str:
    """Returns "met", or by which share of the limit the target is missed."""
    if value is None:
        return "not measured"
    if (value >= target.limit) if target.above else (value <= target.limit):
        return "met"
    if math.isinf(value):
        return "missed"
    return f"missed by {abs(value - target.limit) / target.limit:.0%}"


def table(found: Sequence[tuple[Target, float | None, str]]) -> str:
    lines = [f"{'figure':<38}{'measured':>10}  {'target':>9}  {'':<16}from"]
    for target, value, source in found:
        measured = "-" if value is None else f"{value:.3f} {target.unit}".rstrip()
        limit = f"{'>=' if target.above else '<='} {target.limit:g}"
        lines.append(f"{target.what:<38}{measured:>10}  {limit:>9}  {verdict(target, value):<16}{source}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Figures of GPU runs against their targets.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="run directories and JSON files")
    parser.add_argument("--out", type=Path, help="the same as JSON")
    parser.add_argument(
        "--require", metavar="NAME", help="exit status 1 where no run or file has this figure"
    )
    args = parser.parse_args(argv)
    try:
        found = rows(read(args.paths))
    except (ValueError, OSError) as error:
        print(f"gpu_numbers: {error}", file=sys.stderr)
        return 2
    print(table(found))
    if args.out is not None:
        records = [
            {
                "figure": t.figure,
                "value": value
                if value is not None and math.isfinite(value)
                else None,  # JSON has no infinity
                "limit": t.limit,
                "above": t.above,
                "verdict": verdict(t, value),
                "from": source,
            }
            for t, value, source in found
        ]
        args.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if args.require is not None and all(value is None for t, value, _ in found if t.figure == args.require):
        print(f"gpu_numbers: {args.require} must be measured, got nothing of it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
