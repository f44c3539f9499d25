"""Measures the memory of the router's processes by number of requests: `python benchmarks/router_memory.py OUT.json`.

    python benchmarks/router_memory.py router_memory.json --requests 12800 --every 1600

An engine that answers at once is behind the router, as in a run. 32 requests run at the same time. Each case starts a
new router:

    default           as a run starts it
    one-arena         MALLOC_ARENA_MAX=1: all threads of the router allocate from one heap of glibc
    scraped           its Prometheus counters are read after each `--every` requests
    new-connections   each request has a new connection
    engine-restarts   the engine leaves the router and joins it again after each 32 requests

The memory is allocated memory (`Pss_Anon` and `Pss_Shmem`), without pages of files. `heap` is the part of the router's
process in its main heap, and `arenas` is the part in other anonymous mappings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import torch
from operator_bench.machine import describe

from vime.pool.asgi import health_prefix
from vime.pool.router import RouterSpec
from vime.soak.growth import allocated_kib
from vime.vllm.router import VllmRouter

CASES: dict[str, dict[str, str]] = {
    "default": {},
    "one-arena": {"MALLOC_ARENA_MAX": "1"},
    "scraped": {},
    "new-connections": {},
    "engine-restarts": {},
}
CONCURRENT = 32
TOKENS = (16, 64, 128)


@contextmanager
def start_engine(prefix: str) -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("instant_engine.py")), prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def read_heaps(pid: int) -> dict[str, int]:
    """Returns KiB of private dirty memory of the main heap and of the other anonymous mappings."""
    found = {"heap": 0, "arenas": 0}
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
        elif line.startswith("Private_Dirty:") and name in ("", "[heap]"):
            found["heap" if name else "arenas"] += int(line.split()[1])
    return found


def find_router(parent: psutil.Process) -> psutil.Process:
    """Returns the process of vllm-router: the only one with several threads. The others are its supervisor, the key
    server and the gateway."""
    found = [
        one for one in parent.children(recursive=True) if "vime.vllm.router_main" in " ".join(one.cmdline())
    ]
    return max(found, key=lambda one: one.num_threads())


async def send(url: str, key: str, count: int, first: int, force_close: bool) -> None:
    """Sends `count` requests with different prompts. At most CONCURRENT run at the same time."""
    headers, gate = {"Authorization": f"Bearer {key}"}, asyncio.Semaphore(CONCURRENT)
    connector = aiohttp.TCPConnector(limit=CONCURRENT, force_close=force_close)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one(number: int) -> None:
            prompt = [(number * 31 + i) % 1000 for i in range(64)]
            body = {"model": "policy", "prompt": prompt, "max_tokens": TOKENS[number % len(TOKENS)]}
            async with gate, session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()

        await asyncio.gather(*(one(first + number) for number in range(count)))


def scrape(router: psutil.Process) -> int:
    """Reads the Prometheus counters. Returns the number of their lines."""
    lines = 0
    for port in {one.laddr.port for one in router.net_connections() if one.status == psutil.CONN_LISTEN}:
        done = subprocess.run(
            ["curl", "-s", "--max-time", "5", f"http://127.0.0.1:{port}/metrics"],
            capture_output=True,
            text=True,
        )
        if "vllm_router" in done.stdout:
            lines = done.stdout.count("\n")
    return lines


def measure(case: str, requests: int, every: int, folder: Path) -> list[dict[str, int]]:
    """Returns one row per `every` requests."""
    key = secrets.token_hex(32)
    before = {name: os.environ.get(name) for name in CASES[case]}
    os.environ.update(CASES[case])
    router = VllmRouter(RouterSpec(run_key=key, log_path=str(folder / f"{case}.log")))
    rows = []
    try:
        with start_engine(health_prefix(key)) as engine:
            router.start()
            router.wait_ready()
            router.add(engine)
            process = find_router(psutil.Process())
            for sent in range(0, requests + 1, every):
                for first in range(sent, sent + every if sent else 0, CONCURRENT):
                    asyncio.run(send(router.spec.url, key, CONCURRENT, first, case == "new-connections"))
                    if case == "engine-restarts":
                        router.remove(engine)
                        router.add(engine)
                lines = scrape(process) if case == "scraped" else 0
                others = {
                    f"child_{number}_kib": allocated_kib(one.pid)
                    for number, one in enumerate(sorted(process.children(), key=lambda one: one.pid))
                }
                row = {"requests": sent, "router_kib": allocated_kib(process.pid), **others}
                rows.append(
                    {**row, **read_heaps(process.pid), "threads": process.num_threads(), "lines": lines}
                )
                print(case, rows[-1], flush=True)
    finally:
        router.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=12800)
    parser.add_argument("--every", type=int, default=1600)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            case: measure(case, args.requests, args.every, Path(folder)) for case in args.cases.split(",")
        }
    machine = describe(torch.device("cpu"), sys.argv)
    args.out.write_text(
        json.dumps({"machine": machine, "note": args.note, "cases": rows}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
