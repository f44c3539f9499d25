"""What an update costs trainer ranks whose model is tensor parallel: peak host memory per rank, and seconds.

    python benchmarks/weight_shards.py --out benchmarks/results/weight_shards_cpu.json

A dense Qwen3 of 500 million random weights in bfloat16 on two ranks, which talk through gloo. They publish in three
ways. "gathered, file": rank 0 gathers all tensors and writes them, as adapters and deltas are written. "own slices,
file": each rank writes its own slices. "broadcast of own slices": the buckets of --update-weight-transport nccl to one
engine worker, another process that drops them. Peaks are what the kernel says of a process (VmHWM) beyond what it had
before the first update; files are in /dev/shm and do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_kernel.benchmarks.machine import describe
from slime.config import Config
from slime.megatron_backend.checkpoint.own_slices import own_slices
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.weight_sync.broadcast_channel import BroadcastChannel
from slime.weight_sync.channel import Export, WeightChannel, Worker
from slime.weight_sync.file_channel import FileChannel

RANKS, REPEATS = 2, 3
BUCKET_BYTES = 512 * 2**20
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def rank_work(rank: int, root: Path, case: str, orders: mp.SimpleQueue) -> None:
    """One trainer rank: REPEATS updates. The seconds are of the last one. Rank 0 tells the engine of each part."""
    torch.set_num_threads(1)
    config = Config.from_flat(
        {
            "tensor_model_parallel_size": RANKS,
            "params_dtype": "bfloat16",
            "bf16": True,
            "seed": 0,
            "distributed_timeout_minutes": 5,
            "global_batch_size": 8,
        }
    )
    init_parallel(rank, RANKS, config, init_method=f"file://{root}/store", local_rank=rank)
    model = build_model(SHAPE, config, ddp=False)
    for parameter in model.parameters():
        parameter.data.normal_()  # its pages exist now
    sliced = Export(lambda: export_hf(model), lambda: own_slices(model))
    export = Export(sliced.whole) if "gathered" in case else sliced
    channel: WeightChannel = FileChannel(root / "weights")
    if case.startswith("broadcast"):
        channel = BroadcastChannel(root, BUCKET_BYTES, torch.device("cpu"), 300.0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    for version in range(REPEATS):
        dist.barrier()
        began, sent = time.perf_counter(), 0
        for part in channel.parts(export, version, compare=False, receivers={"engine": 1}):
            sent += part.size_bytes or 0
            if rank == 0 and case.startswith("broadcast"):
                orders.put(part.info)
        dist.barrier()
        found = {"seconds": time.perf_counter() - began, "weights_bytes": sent}
    found |= {"before": before, "peak": status("VmHWM")}
    shard = sum(parameter.nbytes for parameter in model.parameters())
    given = sum(each.place.nbytes for each in export.slices())
    found |= {"shard_bytes": shard, "given_bytes": given}
    (root / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if rank == 0:
        orders.put(None)
    destroy_parallel()


def engine_work(root: Path, orders: mp.SimpleQueue) -> None:
    receiver = BroadcastChannel.on_engine(Worker(torch.device("cpu"), 0, "engine", None))
    while (info := orders.get()) is not None:
        with receiver.receive(info) as part:
            assert part is not None
            for name in part.shapes:
                part.get(name)


def status(name: str) -> int:
    """Bytes of this process, by the kernel's name."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(case: str) -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root, orders = Path(folder), context.SimpleQueue()
        engine = context.Process(target=engine_work, args=(root, orders))
        if case.startswith("broadcast"):
            engine.start()
        mp.start_processes(rank_work, args=(root, case, orders), nprocs=RANKS, start_method="spawn")
        if case.startswith("broadcast"):
            engine.join()
        return [json.loads((root / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


CASES = ("gathered, file", "own slices, file", "broadcast of own slices")


def report(record: dict[str, Any]) -> str:
    lines = ["| update | rank | MB given | peak MB more | share of the model | seconds |", "| --- " * 6 + "|"]
    for case, ranks in record["cases"].items():
        for rank, row in enumerate(ranks):
            more = row["peak"] - row["before"]
            lines.append(
                f"| {case} | {rank} | {row['given_bytes'] / 1e6:.0f} | {more / 1e6:.0f} | "
                f"{more / row['weights_bytes']:.2f} | {row['seconds']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record: dict[str, Any] = {"machine": describe(torch.device("cpu"), sys.argv), "cases": {}}
    for case in CASES:
        record["cases"][case] = measure(case)
        print(case, record["cases"][case], flush=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report(record))


if __name__ == "__main__":
    main()
