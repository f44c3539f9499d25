"""Measures the cost of an update for tensor-parallel trainer ranks: peak host memory per rank, and seconds.

    python benchmarks/weight_shards.py --out benchmarks/results/weight_shards_cpu.json

The model is a dense Qwen3 of 500 million random weights in bfloat16 on two ranks, which communicate through gloo. The
ranks publish with these methods. "gathered, file": rank 0 gathers all tensors and writes them, as it does for
adapters. "own slices, file": each rank writes its own slices. "broadcast of own slices": the buckets of
--update-weight-transport nccl go to one engine worker, a process that drops them. "delta": a whole set, and then
deltas; before each delta, 1% of the values is drawn and changed. "whole set" is the first update of such a run. A peak
is the kernel's VmHWM of a process minus its memory before the first update. Files are in /dev/shm and do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from operator_bench.machine import describe

from slime.config import Config
from slime.megatron_backend.checkpoint.own_slices import OwnSlices
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.protocols import WeightUpdate
from slime.weight_sync.broadcast_channel import BroadcastChannel
from slime.weight_sync.channel import Export, TrainerSettings, WeightChannel, Worker
from slime.weight_sync.delta.snapshot import Delta, Snapshot
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.publisher import Publisher

RANKS, REPEATS = 2, 3
ENGINE = {"engine": 1}
Orders = mp.SimpleQueue
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
    """Runs REPEATS updates on one trainer rank. The seconds are from the last update. Rank 0 notifies the engine."""
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
        parameter.data.normal_()  # This allocates the pages.
    sliced = Export(lambda: export_hf(model), OwnSlices(model))
    export = Export(sliced.whole) if "gathered" in case else sliced
    channel: WeightChannel = FileChannel(root / "weights")
    if "broadcast" in case:
        channel = BroadcastChannel(root, BUCKET_BYTES, torch.device("cpu"), 300.0)
    before, engine = status("VmRSS"), orders if rank == 0 else None
    given = sum(each.position.nbytes for each in export.slices())
    if case.startswith("delta"):
        snapshot = CountedSnapshot("xor", "xxh3-128")
        transport = "nccl" if "broadcast" in case else "disk"
        position = TrainerSettings(root / "weights", BUCKET_BYTES, torch.device("cpu"), 300.0)
        publisher = Publisher.of(transport, position, export, compare=False, snapshot=snapshot)

        def parts(version: int) -> Iterator[WeightUpdate]:
            return iter(lambda: publisher.next(version, ENGINE), None)

        found = {"whole set": updated(parts, [0], engine) | {"given_bytes": given}}
        for version in range(1, 1 + REPEATS):
            change(model, seed=version * RANKS + rank)
            found["delta"] = updated(parts, [version], engine) | {"given_bytes": snapshot.given}
    else:

        def parts(version: int) -> Iterator[WeightUpdate]:
            return channel.parts(export, version, compare=False, receivers=ENGINE)

        found = {"": updated(parts, range(REPEATS), engine) | {"given_bytes": given}}
    shard = sum(parameter.nbytes for parameter in model.parameters())
    for row in found.values():
        row |= {"before": before, "shard_bytes": shard}
    (root / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if rank == 0:
        orders.put(None)
    destroy_parallel()


class CountedSnapshot(Snapshot):
    """A snapshot that also stores the bytes of this rank's part of the last delta."""

    given = 0

    def delta(self, export: Export) -> Delta:
        made = super().delta(export)
        self.given = sum(each.position.nbytes for each in made.slices)
        return made


def change(model: torch.nn.Module, seed: int) -> None:
    """Changes 1% of the values of this rank."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = parameter.data.view(-1)
        for piece in values.split(1 << 20):
            piece[torch.randint(piece.numel(), (piece.numel() // 100,), generator=generator)] *= 1.01


def updated(
    parts: Callable[[int], Iterator[WeightUpdate]], versions: Iterable[int], engine: Orders | None
) -> dict[str, Any]:
    """Runs several updates. Returns the peak over all updates, and the seconds and bytes of the last update. `engine`
    is notified of each part of a broadcast."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # This resets the peak.
    for version in versions:
        dist.barrier()
        began, sent = time.perf_counter(), 0
        for part in parts(version):
            sent += part.size_bytes or 0
            if engine is not None and part.channel == BroadcastChannel.name:
                engine.put(part.info)
        dist.barrier()
        found = {"seconds": time.perf_counter() - began, "sent_bytes": sent}
    return found | {"peak": status("VmHWM")}


def engine_work(root: Path, orders: mp.SimpleQueue) -> None:
    receiver = BroadcastChannel.on_engine(Worker(torch.device("cpu"), 0, "engine", None))
    while (info := orders.get()) is not None:
        with receiver.receive(info) as part:
            assert part is not None
            for name in part.shapes:
                part.get(name)


def status(name: str) -> int:
    """Returns a memory figure of this process in bytes. `name` is the kernel's name of the figure."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(case: str) -> list[dict[str, Any]]:
    """Returns each rank's measurements, by update."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root, orders = Path(folder), context.SimpleQueue()
        engine = context.Process(target=engine_work, args=(root, orders))
        if "broadcast" in case:
            engine.start()
        mp.start_processes(rank_work, args=(root, case, orders), nprocs=RANKS, start_method="spawn")
        if "broadcast" in case:
            engine.join()
        return [json.loads((root / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


CASES = ("gathered, file", "own slices, file", "broadcast of own slices", "delta, file", "delta, broadcast")


def report(record: dict[str, Any]) -> str:
    lines = ["| update | rank | MB given | peak MB more | share of the model | seconds |", "| --- " * 6 + "|"]
    for case, ranks in record["cases"].items():
        weights_bytes = RANKS * ranks[0]["shard_bytes"]
        for rank, row in enumerate(ranks):
            more = row["peak"] - row["before"]
            lines.append(
                f"| {case} | {rank} | {row['given_bytes'] / 1e6:.0f} | {more / 1e6:.0f} | "
                f"{more / weights_bytes:.2f} | {row['seconds']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    args = parser.parse_args()
    record: dict[str, Any] = {"machine": describe(torch.device("cpu"), sys.argv), "cases": {}}
    for case in args.cases:
        of_ranks = measure(case)
        for update in of_ranks[0]:
            name = f"{case}: {update}" if update else case
            record["cases"][name] = [found[update] for found in of_ranks]
            print(name, record["cases"][name], flush=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report(record))


if __name__ == "__main__":
    main()
