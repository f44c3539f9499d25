"""Counts the log-probs of trainer and engine with the same bits, and measures the time per step.

    python benchmarks/bitwise.py OUT                        on a GPU: the shape of SmolLM2-135M, random weights
    python benchmarks/bitwise.py OUT --arch qwen3-tiny      on a CPU
    python benchmarks/bitwise.py OUT --sides bitwise        one side only
    python benchmarks/bitwise.py OUT --ranks 2              two tensor-parallel ranks in trainer and engine
    python benchmarks/bitwise.py OUT --sides bitwise,logged --steps 200 -- --config FILE ...    another run: its flags

trains GRPO once per side, with the same seeds, in OUT/SIDE, and prints one row per side. A finished run is not
repeated. Sides: off (the default operators, not compared), logged (the same, compared), plain (no operator of
rl_kernel, compared), invariant (vLLM's own --vllm-batch-invariant, on GPUs only), head, norms and attention (a part of
the operators of --rlk-bitwise, each including the previous parts), bitwise (all operators, with the products), fp8
(bitwise with products in fp8, only if --sides names it: the heads of most small models are too narrow). Without
other flags, the reward is 1 if the last token is odd, so that a random model can learn. Below a row are the mean
rewards of blocks of 20 steps, and the evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
COMPARED = ("--rlk-consistency", "audit")
ON_GPUS = (
    *("--bf16", "--vllm-max-model-len", "1024"),
    # A small engine, so that the state of a 4B can stay on a GPU of 140 GiB while the engine generates.
    *("--vllm-gpu-memory-utilization", "0.2", "--vllm-kv-cache-memory-bytes", str(8 << 30)),
)
PARTS = {
    "head": "head",
    "norms": "head,norm,activation,rotary",
    "attention": "head,norm,activation,rotary,attention",
}
SIDES = {
    "off": (),
    "logged": COMPARED,
    "plain": (*COMPARED, "--rlk-fast", "off"),
    "invariant": (*COMPARED, "--vllm-batch-invariant"),
    **{side: (*COMPARED, "--rlk-bitwise", "--rlk-bitwise-operators", part) for side, part in PARTS.items()},
    "bitwise": ("--rlk-consistency", "strict", "--rlk-bitwise"),
    "fp8": (
        *("--rlk-consistency", "strict", "--rlk-bitwise"),
        *("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
    ),
}


def odd_end(args: Any, sample: Any, **unused: Any) -> float:
    """Returns the reward: 1 if the last token is odd."""
    return float(sample.tokens[-1] % 2)


def flags(model: Path, asked: argparse.Namespace) -> list[str]:
    """Returns flags of `vime train` for a random model, without the flags that differ between the runs."""
    return [
        *("--hf-checkpoint", str(model), "--colocate"),
        *("--prompt-data", str(model / "arithmetic" / "train.jsonl"), "--input-key", "prompt"),
        *("--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--custom-rm-path", "bitwise.odd_end"),
        *("--rollout-batch-size", str(asked.prompts), "--n-samples-per-prompt", "8"),
        *("--global-batch-size", str(8 * asked.prompts), "--rollout-max-response-len", str(asked.length)),
        *("--actor-num-gpus-per-node", str(asked.ranks), "--rollout-num-gpus-per-engine", str(asked.ranks)),
        *("--tensor-model-parallel-size", str(asked.ranks)),
        *(("--sequence-parallel",) if asked.sequence_parallel else ()),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"),
        *("--lr", "1e-5"),
        *(ON_GPUS if asked.device == "cuda" else ()),
    ]


def run(side: str, given: list[str], asked: argparse.Namespace) -> int:
    """Makes the side's run and returns its exit code. The output of the run is in OUT/SIDE.log."""
    run_dir = asked.out / side
    if (run_dir / "done").exists():
        return 0
    command = [
        sys.executable,
        "-m",
        "vime",
        "train",
        *given,
        *("--run-dir", str(run_dir), "--num-rollout", str(asked.steps), "--device", asked.device),
        *SIDES[side],
        "--overwrite",
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    with open(asked.out / f"{side}.log", "wb") as log:
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if code == 0:
        (run_dir / "done").touch()
    return code


def row(run_dir: Path) -> str:
    """Returns the figures of a run: differing tokens and all tokens, mean and largest difference in nats. Medians
    without the first step: seconds of a step, its rollout and its training, tokens per second of the engine. The
    trainer's peak memory in GiB."""
    steps = [step for step in lines(run_dir / "metrics.jsonl") if "perf/step_time" in step]

    def median(name: str) -> str:
        found = [step[name] for step in steps[1:] if name in step]
        return f"{statistics.median(found):.2f}" if found else "-"

    peaks = [step["perf/trainer_peak_gib"] for step in steps if "perf/trainer_peak_gib" in step]
    names = ("step_time", "rollout_time", "train_time", "tokens_per_gpu_per_sec")
    figures = [*(median(f"perf/{name}") for name in names), f"{max(peaks):.1f}" if peaks else "-"]
    return " | ".join([compared(run_dir), *figures])


def compared(run_dir: Path) -> str:
    """Returns differing tokens and all tokens, mean and largest difference."""
    if not (run_dir / "audit.jsonl").exists():
        return "not compared | - | -"
    audits = lines(run_dir / "audit.jsonl")
    tokens = sum(a["tokens"] for a in audits)
    differing = sum(a["tokens"] - a.get("bitwise_equal_tokens", 0) for a in audits)
    mean = sum(a["tokens"] * a.get("abs_dlogp_mean", 0) for a in audits) / max(tokens, 1)
    largest = max(a.get("abs_dlogp_max", 0) for a in audits)
    return f"{differing:.0f} of {tokens:.0f} | {mean:.2e} | {largest:.2e}"


def curves(run_dir: Path) -> str:
    """Returns mean rewards of blocks of 20 steps, and the scores of the evaluations."""
    steps = lines(run_dir / "metrics.jsonl")
    rewards = [step["rollout/raw_reward"] for step in steps if "rollout/raw_reward" in step]
    means = [statistics.fmean(rewards[i : i + 20]) for i in range(0, len(rewards), 20)]
    evaluations: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            if (
                name.startswith("eval/")
                and name.count("/") == 1
                and isinstance(value, float)
                and "-" not in name
            ):
                evaluations.setdefault(name, []).append(value)
    found = {"reward": means, **evaluations}
    return "\n".join(
        f"  {name}: {' '.join(f'{value:.4f}' for value in values)}" for name, values in found.items()
    )


def random_model(asked: argparse.Namespace) -> Path:
    model: Path = asked.out / asked.arch
    if not model.exists():
        make = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "--arch", asked.arch, "--random"]
        subprocess.run([*make, "--arithmetic", str(model)], check=True)
    return model


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count log-probs with the same bits.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="smollm2-135m", help="a row of scripts/architectures.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sides", help="separated by commas; default: all that the device has")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=16, help="each with 8 samples")
    parser.add_argument("--length", type=int, default=128, help="most tokens of a response")
    parser.add_argument(
        "--ranks", type=int, default=1, help="tensor-parallel ranks of the trainer and of the engine"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="in the trainer, with --ranks above 1"
    )
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    asked, given = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    others = {"fp8"} if asked.device == "cuda" else {"fp8", "invariant"}
    of_device = [side for side in SIDES if side not in others]
    sides = asked.sides.split(",") if asked.sides else of_device
    if unknown := [side for side in sides if side not in SIDES]:
        parser.error(f"--sides must be of {', '.join(SIDES)}, got {unknown[0]}")
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    print(
        "side | differing tokens | mean difference | largest | step, s | rollout, s | training, s | tokens/s | "
        "peak, GiB",
        flush=True,
    )
    for side in sides:
        code = run(side, given or flags(random_model(asked), asked), asked)
        there = (asked.out / side / "metrics.jsonl").exists()
        print(f"{side} | {row(asked.out / side) if there else 'no step'}", flush=True)
        if there:
            print(curves(asked.out / side), flush=True)
        if code:
            log = (asked.out / f"{side}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            print(f"  exit code {code}: " + "\n  ".join(log[-12:]), flush=True)


if __name__ == "__main__":
    main()
