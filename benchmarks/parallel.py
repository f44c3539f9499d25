"""`python benchmarks/parallel.py`: compares the linear operators on two GPUs with one GPU and half the vocabulary.

Two processes (NCCL; gloo and tiny shapes on a CPU) have half of the weight each. Every operator runs with and without
the group, in turns, with the same work per process. The difference is the cost of the collectives.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from operator_bench.machine import describe
from operator_bench.problem import select_cases
from operator_bench.timing import FILL_MS, CudaClock, HostClock, heat
from torch import Tensor

from rl_kernel import linear_logp, linear_token_loss
from rl_kernel.ops.linear_logp.cases import LinearCase

PROCESSES = 2
LIMIT = 1.10
CASES = "T3,Q4B-4k,Q4B-16k,Q8B-8k"


def main(argv: Sequence[str] | None = None) -> int:
    command = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python benchmarks/parallel.py", description=__doc__)
    parser.add_argument("--cases", metavar="NAME,..", help="shapes of the whole layer")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", help="name the commit where the files came without their history")
    arguments = parser.parse_args(command)
    on_gpus = torch.cuda.device_count() >= PROCESSES
    cases = select_cases(
        arguments.cases or (CASES if on_gpus else None), torch.device("cuda" if on_gpus else "cpu")
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, cases, on_gpus, arguments.rounds), nprocs=PROCESSES)
        rows = [row for case in cases for row in _merged(folder, case)]
    machine = describe(
        torch.device("cuda" if on_gpus else "cpu"), ["benchmarks/parallel.py", *command], arguments.commit
    )
    for row in rows:
        verdict = "" if not on_gpus else ("MET" if row["ratio"] <= LIMIT else "MISSED")
        print(f"{row['case']:8s} {row['row']:32s} {row['one_ms']:8.3f} ms alone {row['two_ms']:8.3f} ms together "
              f"{row['ratio']:6.3f} {verdict}")  # fmt: skip
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"machine": machine, "limit": LIMIT, "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )
    return 0


def _rank(rank: int, folder: str, cases: list[LinearCase], on_gpus: bool, rounds: int) -> None:
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/init", rank=rank, world_size=PROCESSES)
    for case in cases:
        found = _measure(case, rank, device, rounds)
        Path(folder, f"{case.name}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _measure(case: LinearCase, rank: int, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of every call, by operator, alone and together."""
    clock = CudaClock() if device.type == "cuda" else HostClock()
    contenders = _contenders(case, rank, device)
    heat(contenders[("linear_logp forward", "alone")], clock, 1.0 if device.type == "cuda" else 0.0)
    meet = _meeting(device)
    marks: dict[tuple[str, str], list[tuple[Any, Any]]] = {key: [] for key in contenders}
    for turn in range(rounds + 1):
        for key, call in contenders.items():
            meet()
            start = clock.mark()
            call()
            if turn:
                marks[key].append((start, clock.mark()))
        clock.finish()
    return {
        f"{row}|{how}": [clock.elapsed_ms(*span) for span in spans] for (row, how), spans in marks.items()
    }


def _meeting(device: torch.device) -> Callable[[], None]:
    """Returns a function to call before a timed call. Both processes then start together, with queued work as in
    training.

    On GPUs, the hosts' launches run ahead during matrix products of FILL_MS. An all-reduce on the stream then
    synchronises the GPUs, for any delay between their hosts.
    """
    token = torch.zeros(1, device=device)
    if device.type == "cpu":
        return dist.barrier
    square = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    products = math.ceil(FILL_MS / 1.5)  # a product takes an H200 1.4 to 1.6 ms

    def meet() -> None:
        for _ in range(products):
            torch.mm(square, square)
        dist.all_reduce(token)

    return meet


def _contenders(
    case: LinearCase, rank: int, device: torch.device
) -> dict[tuple[str, str], Callable[[], Any]]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16
    hidden = (
        torch.randn(case.tokens, case.hidden, generator=generator, device=device).to(dtype).requires_grad_()
    )
    first = case.vocab // PROCESSES * rank
    mine = case.vocab // PROCESSES if rank < PROCESSES - 1 else case.vocab - first
    weight = (torch.randn(mine, case.hidden, device=device) * 0.02).to(dtype).requires_grad_()
    everywhere = torch.randint(case.vocab, (case.tokens,), generator=generator, device=device)
    here = everywhere % mine
    upstream = torch.randn(case.tokens, generator=generator, device=device)
    weight_grad = torch.zeros(weight.shape, device=device)
    shared = {"tp_group": dist.group.WORLD, "vocab_start": first}

    def loss(log_probs: Tensor, entropy: Tensor | None, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return (log_probs * upstream[rows]).sum(), {}

    def forward(targets: Tensor, **kwargs: Any) -> None:
        with torch.no_grad():
            linear_logp(hidden, weight, targets, **kwargs)

    def both(targets: Tensor, **kwargs: Any) -> None:
        hidden.grad = weight.grad = None
        log_probs = linear_logp(hidden, weight, targets, **kwargs)
        assert isinstance(log_probs, Tensor)
        log_probs.backward(upstream)

    def one_pass(targets: Tensor, **kwargs: Any) -> None:
        hidden.grad = None
        linear_token_loss(hidden, weight, targets, loss, weight_grad=weight_grad, **kwargs).loss.backward()

    rows = {"linear_logp forward": forward, "linear_logp 1.5GiB": both, "linear_token_loss 1.5GiB": one_pass}
    found: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, call in rows.items():
        found[name, "alone"] = partial(call, here)
        found[name, "together"] = partial(call, everywhere, **shared)
    return found


def _merged(folder: str, case: LinearCase) -> list[dict[str, Any]]:
    """Returns the medians of the slower process."""
    ranks = [
        json.loads(Path(folder, f"{case.name}-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(PROCESSES)
    ]
    slowest = {key: max(statistics.median(found[key]) for found in ranks) for key in ranks[0]}
    rows = []
    for name in dict.fromkeys(key.split("|")[0] for key in slowest):
        one, two = slowest[f"{name}|alone"], slowest[f"{name}|together"]
        rows.append({"case": case.name, "row": name, "one_ms": one, "two_ms": two, "ratio": two / one})
    return rows


if __name__ == "__main__":
    sys.exit(main())
