"""Measures the speed of a trainer rank: model FLOPs utilisation, the parts of a step, peak memory by phase.

    python benchmarks/training_speed.py --hf-checkpoint DIR --sequences 32 --prompt-len 512 --response-len 3584 \
        --use-dynamic-batch-size --max-tokens-per-gpu 16384 [any flag of vime train]

The trainer (slime.megatron_backend.step) processes sequences of random ids and equal length like the sequences of a
rollout, without an engine and Ray. Every step is one optimizer step. With --colocate --offload-train, the state moves
to the host and back after each step. With --ranks N, N processes train on the first N GPUs; the figures are from rank
0, and FLOPs are divided by N.

Model FLOPs are 6 x parameters of the layers x tokens, plus attention, plus the head over the response
(slime.plan.flops.ForwardFlops). Recomputation does not count. They are divided by the time of actor_train: forward,
loss, backward and optimizer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from gpu_numbers import PEAK_TFLOPS
from operator_bench.machine import describe

from slime.checkpoints.hf_config import read_hf_config
from slime.data.train_data import make_rank_data
from slime.plan.flops import ForwardFlops
from slime.system.allocator import choose_settings
from slime.types import Sample, TrainData
from vime.backends import parse_config

with warnings.catch_warnings():  # Megatron warns about optional packages at import.
    warnings.simplefilter("ignore", UserWarning)
    from slime.megatron_backend.step.trainer import MegatronTrainer

COMPILING = 2
"""Number of first steps, which compile kernels and do not count."""


def made_up(count: int, group: int, prompt: int, response: int, vocab: int, seed: int) -> list[Sample]:
    """Makes `count` samples in groups of `group`, with alternating rewards 0 and 1."""
    rng = random.Random(seed)
    return [
        Sample(
            index=i,
            group_index=i // group,
            tokens=rng.choices(range(vocab), k=prompt + response),
            response_length=response,
            loss_mask=[1] * response,
            rollout_log_probs=[-math.log(vocab)] * response,
            reward=float(i % 2),
            status=Sample.Status.COMPLETED,
        )
        for i in range(count)
    ]


def config_of(arguments: argparse.Namespace, given: list[str], run_dir: str) -> Any:
    batch = [
        *("--rollout-batch-size", str(arguments.sequences // arguments.group)),
        *("--n-samples-per-prompt", str(arguments.group)),
        *("--global-batch-size", str(arguments.sequences), "--num-rollout", str(arguments.steps)),
    ]
    ranks = ["--actor-num-gpus-per-node", str(arguments.ranks)]
    fixed = ["--debug-train-only", "--disable-rollout-global-dataset", *ranks]
    return parse_config([*fixed, *batch, "--run-dir", run_dir, "--weight-dir", run_dir, *given])


def batch(
    arguments: argparse.Namespace, trainer: MegatronTrainer, hf_config: dict[str, Any], step: int
) -> TrainData:
    """Returns the rank's part of a step."""
    lengths = arguments.group, arguments.prompt_len, arguments.response_len
    samples = made_up(arguments.sequences, *lengths, hf_config["vocab_size"], step)
    parts = make_rank_data(trainer.config, trainer.hooks, samples, trainer.info.dp_size, hf_config)
    return parts[trainer.info.dp_rank]


def top_kernels(trainer: MegatronTrainer, arguments: argparse.Namespace, hf_config: dict[str, Any]) -> str:
    """Runs one more step. Returns two tables: the kernels with the most device time, and the calls with the most host
    time."""
    data = batch(arguments, trainer, hf_config, arguments.steps)
    with torch.profiler.profile() as profile:
        trainer.train(arguments.steps, data)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    keys = ["self_cpu_time_total"] + ["self_cuda_time_total"] * torch.cuda.is_available()
    averages = profile.key_averages()
    return "\n".join(
        averages.table(sort_by=key, row_limit=arguments.kernels, max_name_column_width=80) for key in keys
    )


def list_waits(trainer: MegatronTrainer, arguments: argparse.Namespace, hf_config: dict[str, Any]) -> str:
    """Runs one more step. Returns the lines where the host waits for the GPU, with the number of waits."""
    data = batch(arguments, trainer, hf_config, arguments.steps + 1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.train(arguments.steps + 1, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{x.filename}:{x.lineno}" for x in found if "synchroniz" in str(x.message))
    return "\n".join(f"{count:6} waits in {place}" for place, count in places.most_common())


def train(rank: int, arguments: argparse.Namespace, given: list[str], folder: str) -> None:
    """Trains `--steps` steps on one rank. Rank 0 prints every step's timers and writes them to rows.json."""
    if arguments.ranks > 1 or torch.cuda.is_available():
        # As Ray does for an actor with a GPU. With all cores, ranks would share them, and on a busy host, operations on
        # small tensors would wait for threads whose core another process uses.
        torch.set_num_threads(1)
    config = config_of(arguments, given, folder)
    hf_config = read_hf_config(config.rollout.hf_checkpoint)
    store = f"file://{folder}/store"
    trainer = MegatronTrainer(config, rank, arguments.ranks, init_method=store, local_rank=rank)
    rows = []
    for step in range(arguments.steps):
        perf = trainer.train(step, batch(arguments, trainer, hf_config, step)).perf
        # A weight update does the same.
        trainer.policy.residence.release("parameters", timer="weights_offload")
        rows.append(perf)
        if rank == 0:
            print(json.dumps({"step": step, **{k: round(v, 4) for k, v in sorted(perf.items())}}), flush=True)
    if arguments.kernels:
        table = top_kernels(trainer, arguments, hf_config)
        if rank == 0:
            print(table, flush=True)
    if arguments.waits:
        lines = list_waits(trainer, arguments, hf_config)
        if rank == 0:
            print(lines, flush=True)
    trainer.close()
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def measure(arguments: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    """Trains on all ranks. Returns medians over all steps except the first COMPILING."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config = read_hf_config(config_of(arguments, given, folder).rollout.hf_checkpoint)
        if arguments.ranks == 1:
            train(0, arguments, given, folder)
        else:
            mp.spawn(train, (arguments, given, folder), nprocs=arguments.ranks)
        rows = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    length = arguments.prompt_len + arguments.response_len
    flops = 3 * arguments.sequences * ForwardFlops(hf_config)(length, arguments.response_len)
    body = 3 * arguments.sequences * ForwardFlops(hf_config)(length, 0)
    kept = rows[COMPILING:]
    medians = {key: statistics.median(row[key] for row in kept) for key in kept[0]}
    seconds, peak = medians["perf/actor_train_time"], arguments.peak_tflops
    flops, body = flops / arguments.ranks, body / arguments.ranks
    used = {"mfu": flops, "mfu_without_head": body} if peak else {}
    passes = medians["perf/forward_time"] + medians["perf/backward_time"]
    return {
        **{name: done / seconds / 1e12 / peak for name, done in used.items()},
        "peak_tflops": peak,
        "tflops": flops / seconds / 1e12,
        "tflops_of_passes": flops / passes / 1e12,
        "tokens_per_s": arguments.sequences * length / seconds,
        "medians": medians,
        "steps": rows,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes, one per GPU")
    parser.add_argument("--sequences", type=int, default=32, help="a step; a multiple of --group")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt, at least 2")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--response-len", type=int, default=3584)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=PEAK_TFLOPS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None,
        help=f"of the device, for the MFU; known of {', '.join(PEAK_TFLOPS)}, without it there is none",
    )
    parser.add_argument("--kernels", type=int, default=0, help="show this many kernels of one more step")
    parser.add_argument(
        "--waits", action="store_true", help="list the host's waits for the GPU in one more step"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--commit", help="of the measured code, where git does not know it")
    arguments, given = parser.parse_known_args(argv)
    choose_settings(os.environ, (), expand=True)  # as trainers of a run do
    try:
        report(arguments, given, argv)
    except ValueError as error:
        print(f"training_speed: {error}", file=sys.stderr)
        return 2
    return 0


def report(arguments: argparse.Namespace, given: list[str], argv: list[str]) -> None:
    """Measures, prints the results, and writes --out."""
    if arguments.group < 2:
        raise ValueError(f"--group must be at least 2, got {arguments.group}; the rewards of a group differ")
    if arguments.sequences < arguments.group or arguments.sequences % arguments.group:
        raise ValueError(
            f"--sequences must be a multiple of --group {arguments.group}, got {arguments.sequences}"
        )
    if arguments.steps <= COMPILING:
        raise ValueError(
            f"--steps must be more than the {COMPILING} that compile kernels, got {arguments.steps}"
        )
    if arguments.out and not arguments.out.parent.is_dir():
        raise ValueError(f"--out must name a file in a folder that exists, got {arguments.out}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "machine": describe(device, ["benchmarks/training_speed.py", *argv], arguments.commit),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
        **measure(arguments, given),
    }
    print(json.dumps({k: v for k, v in result.items() if k != "steps"}, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
