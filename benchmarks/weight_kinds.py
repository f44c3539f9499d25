"""Measures bytes and seconds of an update with all weights, with a delta, and with an adapter alone.

    python benchmarks/weight_kinds.py --of 1e-6=DIR 5e-6=DIR --out weight_kinds_cpu.json
    python benchmarks/weight_kinds.py --runs full=RUN delta=RUN adapter=RUN --out weight_kinds_runs_cpu.json
    python benchmarks/weight_kinds.py --show weight_kinds_cpu.json              the tables of a record

RUN is the --run-dir of a whole run of this kind, with its trainer and engine. The script reads its metrics, and whether
the engine compared all live weights in each update (--check-weight-update-equal).

DIR is the --weight-dir of a run with --update-weight-disk-keep-files, of mode full or delta; its name is the learning
rate. Each version is compared with the previous version, with the functions of a run. float32 weights are first rounded
to bfloat16. Seconds are for one call. Peak memory is measured in a separate process per case, with 500 million bfloat16
weights that arrive tensor by tensor.
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from operator_bench.machine import describe
from safetensors.torch import load_file

from slime.protocols import WeightUpdate
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.delta import sparse
from slime.weight_sync.delta.local_copy import CopyVersion, LocalCopy
from slime.weight_sync.delta.payload import apply, octets, words
from slime.weight_sync.delta.registry import ENCODINGS, encoding
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.publisher import Publisher
from slime.weight_sync.slices import Slice, whole_slices
from slime.weight_sync.slices import SlicePosition as SlicePlace

RANK = 32
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COMPRESSIONS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "none": (bytes, bytes),
    "zlib 1": (lambda raw: zlib.compress(raw, 1), zlib.decompress),
    "zlib 6": (lambda raw: zlib.compress(raw, 6), zlib.decompress),
    "zlib, Huffman only": (lambda raw: _huffman(raw), zlib.decompress),
    "bz2 1": (lambda raw: bz2.compress(raw, 1), bz2.decompress),
    "lzma 0": (lambda raw: lzma.compress(raw, preset=0), lzma.decompress),
}
Tensors = dict[str, torch.Tensor]


def _huffman(raw: bytes) -> bytes:
    packer = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    return packer.compress(raw) + packer.flush()


def timed(act: Callable[[], Any], times: int = 1) -> tuple[float, Any]:
    """Returns the shortest time in seconds, and the result."""
    best, result = float("inf"), None
    for _ in range(times):
        began = time.perf_counter()
        result = act()
        best = min(best, time.perf_counter() - began)
    return best, result


def versions(directory: Path) -> Iterator[Tensors]:
    """Yields the published weights of a run, in order."""
    current: Tensors = {}
    count = len([*directory.glob("weights-*"), *directory.glob("delta-*")])
    for version in range(count):
        whole, delta = (
            directory / f"{stem}-{version}" / "model.safetensors" for stem in ("weights", "delta")
        )
        if whole.exists():
            current = {name: tensor.bfloat16() for name, tensor in load_file(whole).items()}
        else:
            current = {name: tensor.clone() for name, tensor in current.items()}
            for name, payload in load_file(delta).items():
                if (wrong := apply(octets(current[name]), payload)) is not None:
                    raise RuntimeError(f"{name} of version {version}: {wrong}")
        yield current


def step(old: Tensors, new: Tensors, scratch: Path) -> dict[str, Any]:
    """Measures one update per kind."""
    row: dict[str, Any] = {"full": full(new, scratch), "delta": {}}
    for name in ENCODINGS:
        row["delta"][name] = delta(old, new, name, scratch)
    row["adapter"] = full(adapter(new), scratch)
    return row


def full(tensors: Tensors, scratch: Path) -> dict[str, float]:
    channel = FileChannel(scratch / "full")
    seconds, update = timed(lambda: channel.publish(whole_slices(tensors.items()), 1))
    size = Path(update.info["path"]).stat().st_size
    shutil.rmtree(scratch / "full")
    return {"bytes": size, "trainer_s": seconds}


def delta(old: Tensors, new: Tensors, name: str, scratch: Path) -> dict[str, float]:
    trainer, host = [], []
    for _ in range(1):
        snapshot, copy = Snapshot(name, "xxh3-128"), LocalCopy(scratch / "copy")
        source = FileChannel(scratch / "whole").publish(snapshot.taken(Export(old.items)), 0)
        copy.keep(source.info["path"], CopyVersion("chain", 0))
        files = FileChannel(scratch / "delta", stem="delta")

        shares: list[float] = []

        def publish(
            snapshot: Snapshot = snapshot, files: FileChannel = files, shares: list[float] = shares
        ) -> WeightUpdate:
            made = snapshot.delta(Export(new.items))
            shares.append(made.density)
            return files.publish(made.slices, 1)

        seconds, update = timed(publish, 1)
        trainer.append(seconds)
        payloads = load_file(update.info["path"])
        seconds, _ = timed(lambda: copy.patch(payloads, 0, CopyVersion("chain", 1)), 1)  # noqa: B023
        host.append(seconds)
        result = load_file(copy.path)
        equal = all(np.array_equal(octets(result[n]), octets(t)) for n, t in new.items())
        size = Path(update.info["path"]).stat().st_size
        for folder in ("copy", "whole", "delta"):
            shutil.rmtree(scratch / folder)
    return {
        "bytes": size,
        "share": shares[0],
        "trainer_s": min(trainer),
        "host_s": min(host),
        "equal": equal,
    }


def adapter(tensors: Tensors) -> Tensors:
    """Returns matrices of a LoRA adapter of RANK for every linear layer of a decoder layer."""
    found = {}
    for name, tensor in tensors.items():
        if name.removesuffix(".weight").rpartition(".")[2] in LINEAR:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{module}.lora_A.weight"] = torch.zeros(RANK, tensor.shape[1], dtype=torch.bfloat16)
            found[f"{module}.lora_B.weight"] = torch.zeros(tensor.shape[0], RANK, dtype=torch.bfloat16)
    return found


def compressions(old: Tensors, new: Tensors) -> dict[str, dict[str, float]]:
    """Measures each compression of the records of an update, on one thread."""
    kept: list[bytes] = []
    plain = zlib.compress
    sparse.zlib.compress = lambda raw, level: kept.append(raw) or plain(raw, level)  # type: ignore[assignment,func-returns-value,attr-defined]
    try:
        for name, tensor in new.items():
            sparse.pack(words(octets(old[name]), 2), words(octets(tensor), 2), encoding("xor"))
    finally:
        sparse.zlib.compress = plain  # type: ignore[attr-defined]
    found = {}
    for name, (pack, unpack) in COMPRESSIONS.items():
        packing, packed = timed(lambda: [pack(raw) for raw in kept])  # noqa: B023
        unpacking, _ = timed(lambda: [unpack(data) for data in packed])  # noqa: B023
        found[name] = {"bytes": sum(map(len, packed)), "pack_s": packing, "unpack_s": unpacking}
    return found


def peak(case: str) -> dict[str, float]:
    """Returns a rank's host memory, in bytes: before an update, and at its peak."""
    source = torch.empty(2048, 2048, dtype=torch.bfloat16).normal_()
    sent = source.clone()  # A replacement for GPU memory: on a GPU, the export needs no host memory.

    def values(i: int, version: int) -> torch.Tensor:
        sent.copy_(source).mul_(1 + i)
        if version:
            sent.view(-1)[::100].mul_(1.25)
        return sent.clone()

    def slices(version: int) -> Iterator[Slice]:
        for i in range(119):  # 499 million values
            shape = (2048, 2048)
            slice_place = SlicePlace(f"layers.{i}", "bfloat16", shape, tuple((0, size) for size in shape))
            yield Slice(slice_place, partial(values, i, version))

    version = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        position = TrainerSettings(Path(root), 1 << 29, torch.device("cpu"), 60.0)
        snapshot = None if case == "full" else Snapshot("xor", "xxh3-128")
        publisher = Publisher.of(
            "disk", position, Export(None, lambda: slices(version)), compare=False, snapshot=snapshot
        )
        before = _status("VmRSS")
        for version in range(2 if case == "delta" else 1):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # This resets the peak.
            while publisher.next(version, {"engine": 1}) is not None:
                pass
    return {"weights_bytes": 2 * 119 * 2048**2, "before": before, "peak": _status("VmHWM")}


def _status(name: str) -> int:
    """Returns a memory figure of this process in bytes. `name` is the kernel's name of the figure."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peaks() -> dict[str, dict[str, float]]:
    found = {}
    for case in ("full", "delta whole", "delta"):
        out = subprocess.run(
            [sys.executable, __file__, "--peak", case], capture_output=True, text=True, check=True
        )
        found[case] = json.loads(out.stdout.splitlines()[-1])
    return found


def measure(runs: dict[str, Path]) -> dict[str, Any]:
    record: dict[str, Any] = {"machine": describe(torch.device("cpu"), sys.argv), "steps": {}}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        for name, directory in runs.items():
            steps, last = [], None
            for tensors in versions(directory):
                if last is not None:
                    steps.append(step(last, tensors, Path(root)))
                    print(f"{name}, step {len(steps) - 1}: {steps[-1]}", flush=True)
                    if "compressions" not in record:
                        record["compressions"] = compressions(last, tensors)
                last = tensors
            record["steps"][name] = steps
    record["memory"] = peaks()
    return record


def speeds(share: float, updates: int = 4) -> dict[str, Any]:
    """Measures the seconds to make and to apply a delta of 505 million bfloat16 weights, of which `share` changes."""
    shapes = [(1536, 4096)] * 40 + [(4096, 1536)] * 20 + [(1536, 1536)] * 40 + [(32768, 1024)]
    weights = {f"w{i}": torch.empty(*shape, dtype=torch.bfloat16).normal_() for i, shape in enumerate(shapes)}
    found: dict[str, Any] = {"share": share, "weights": sum(t.numel() for t in weights.values())}
    found |= {"trainer_s": [], "host_s": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        snapshot, copy = Snapshot("xor", "xxh3-128"), LocalCopy(f"{root}/copy")
        source = FileChannel(f"{root}/whole").publish(snapshot.taken(Export(weights.items)), 0)
        copy.keep(source.info["path"], CopyVersion("chain", 0))
        for version in range(updates):
            for tensor in weights.values():
                places = torch.randint(0, tensor.numel(), (int(tensor.numel() * share),))
                tensor.view(-1)[places] *= 1.01
            seconds, made = timed(lambda: snapshot.delta(Export(weights.items)))
            payloads = {each.position.name: each.values() for each in made.slices}
            found["trainer_s"].append(seconds)
            seconds, _ = timed(lambda: copy.patch(payloads, version, CopyVersion("chain", version + 1)))  # noqa: B023
            found["host_s"].append(seconds)
        result = load_file(copy.path)
        found["equal"] = all(np.array_equal(octets(result[n]), octets(t)) for n, t in weights.items())
    return found


def run_record(kind: str, run_dir: Path) -> dict[str, Any]:
    """Returns the updates of a run after the first update, which has all weights or a new adapter. ValueError for a run
    that has not finished."""
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/update_weights_time" in row]
    if len(rows) != config["data"]["num_rollout"]:
        raise ValueError(
            f"{run_dir} must be a run of {config['num_rollout']} rollouts, got {len(rows)}; run it again"
        )
    found = {
        "kind": kind,
        "model": Path(config["rollout"]["hf_checkpoint"]).name,
        "dtype": config["megatron"]["params_dtype"],
        "lr": config["megatron"]["lr"],
        "transport": config["weight_update"]["update_weight_transport"],
        "rank": config["lora"]["lora_rank"],
        "compared": config["weight_update"]["check_weight_update_equal"],
    }
    for name, metric in (("s", "time"), ("bytes", "wire_bytes"), ("share", "density")):
        found[name] = [row[f"perf/update_weights_{metric}"] for row in rows]
    return found


def run_report(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| kind | MB that the engine gets | values changed | seconds, median | seconds | live weights compared |"
    ]
    lines.append("| --- " * 6 + "|")
    for run in runs:
        kind = f"adapter, rank {run['rank']}" if run["rank"] else f"{run['kind']}, lr {run['lr']:g}"
        size, share = median(run["bytes"]) / 1e6, "-" if run["rank"] else f"{median(run['share']):.2%}"
        seconds = ", ".join(f"{s:.2f}" for s in run["s"])
        compared = f"equal in {len(run['s'])} of {len(run['s'])}" if run["compared"] else "no"
        lines.append(f"| {kind} | {size:.2f} | {share} | {median(run['s']):.2f} | {seconds} | {compared} |")
    return "\n".join(lines)


def speed_report(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| values changed | trainer s, best | all | host s, best | all | equal to the bit |",
        "| --- " * 6 + "|",
    ]
    for row in rows:
        times = [
            f"{min(row[n]):.2f} | {', '.join(f'{s:.2f}' for s in row[n])}" for n in ("trainer_s", "host_s")
        ]
        lines.append(
            f"| {row['share']:.1%} | {times[0]} | {times[1]} | {'yes' if row['equal'] else '**no**'} |"
        )
    return "\n".join(lines)


def report(record: dict[str, Any]) -> str:
    if "runs" in record:
        return f"{run_report(record['runs'])}\n\n{speed_report(record['speeds'])}"
    lines = ["| learning rate | step | changed | full MB | xor MB | full / xor | overwrite MB | adapter MB |"]
    lines.append("| --- " * 8 + "|")
    for rate, steps in record["steps"].items():
        for i, row in enumerate(steps):
            xor, over = row["delta"]["xor"], row["delta"]["overwrite"]
            whole = row["full"]["bytes"]
            lines.append(
                f"| {rate} | {i} | {xor['share']:.2%} | {whole / 1e6:.1f} | {xor['bytes'] / 1e6:.2f} | "
                f"{whole / xor['bytes']:.0f} | {over['bytes'] / 1e6:.2f} | {row['adapter']['bytes'] / 1e6:.2f} |"
            )
    lines += ["", "| kind | trainer s | host s | equal to the bit |", "| --- " * 4 + "|"]
    rows = [row for steps in record["steps"].values() for row in steps]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    lines.append(f"| full | {mean([r['full']['trainer_s'] for r in rows]):.2f} | - | - |")
    for name in ENCODINGS:
        own = [r["delta"][name] for r in rows]
        times = (mean([r["trainer_s"] for r in own]), mean([r["host_s"] for r in own]))
        equal = f"{sum(r['equal'] for r in own)} of {len(own)} steps"
        lines.append(f"| delta, {name} | {times[0]:.2f} | {times[1]:.2f} | {equal} |")
    lines.append(f"| adapter, rank {RANK} | {mean([r['adapter']['trainer_s'] for r in rows]):.3f} | - | - |")
    lines += ["", "| compression | MB | pack s | unpack s |", "| --- " * 4 + "|"]
    for name, row in record["compressions"].items():
        lines.append(f"| {name} | {row['bytes'] / 1e6:.2f} | {row['pack_s']:.2f} | {row['unpack_s']:.2f} |")
    lines += [
        "",
        "| update of 500 million weights | peak host memory, in copies of the model |",
        "| --- " * 2 + "|",
    ]
    for name, row in record["memory"].items():
        lines.append(f"| {name} | {(row['peak'] - row['before']) / row['weights_bytes']:.2f} |")
    return "\n".join(lines)


def write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report(record))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", nargs="+", default=[], metavar="RATE=DIR")
    parser.add_argument("--runs", nargs="+", default=[], metavar="KIND=DIR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path)
    parser.add_argument("--peak")
    given = parser.parse_args()
    if given.show is not None:
        print(report(json.loads(given.show.read_text(encoding="utf-8"))))
        return
    pairs = [(name, Path(path)) for name, _, path in (one.partition("=") for one in given.runs or given.of)]
    if given.runs:
        runs = [run_record(kind, run_dir) for kind, run_dir in pairs]
    with tempfile.TemporaryDirectory() as root:
        dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
        if given.runs:
            record = {"machine": describe(torch.device("cpu"), sys.argv), "runs": runs}
            write(given.out, record | {"speeds": [speeds(share) for share in (0.002, 0.02)]})
        elif given.peak is not None:
            print(json.dumps(peak(given.peak)))
        else:
            write(given.out, measure(dict(pairs)))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
