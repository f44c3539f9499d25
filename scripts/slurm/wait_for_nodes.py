"""Waits until all nodes of a Slurm job have joined Ray's head, and prints the missing nodes. node.sh calls it.

When the head answers, its address is written to LOG_DIR/address. The other nodes wait for that file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray


def main(argv: list[str]) -> int:
    """Returns exit status 0 if all nodes have joined, 1 if the time is over or Ray's head has ended."""
    parser = argparse.ArgumentParser(description="Wait until all nodes of a job have joined Ray's head.")
    parser.add_argument("nodes", nargs="+", help="the names that the nodes gave to `ray start --node-name`")
    parser.add_argument("--address", required=True, help="HOST:PORT of Ray's head")
    parser.add_argument("--head-timeout-s", required=True, type=float)
    parser.add_argument("--join-timeout-s", required=True, type=float)
    parser.add_argument("--log-dir", required=True, type=Path)
    parser.add_argument(
        "--ray-pid", required=True, type=int, help="the process of `ray start --head --block`"
    )
    args = parser.parse_args(argv)

    def timer(seconds: float) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() < end and Path(f"/proc/{args.ray_pid}").exists()

    if not connect(args.address, timer(args.head_timeout_s)):
        print(f"slurm: Ray's head on {args.nodes[0]} does not answer at {args.address}", file=sys.stderr)
        print(f"slurm: its log: {args.log_dir / f'ray-{args.nodes[0]}.log'}", file=sys.stderr)
        return 1
    new = args.log_dir / "address.new"
    new.write_text(args.address, encoding="utf-8")
    os.replace(new, args.log_dir / "address")
    if not (missing := wait(args.nodes, timer(args.join_timeout_s))):
        print(f"slurm: {len(args.nodes)} of {len(args.nodes)} nodes have joined Ray's head at {args.address}")
        return 0
    joined = len(args.nodes) - len(missing)
    print(
        f"slurm: all nodes must join Ray within {args.join_timeout_s:.0f} s, got {joined} of {len(args.nodes)}; "
        f"missing: {', '.join(missing)}; set JOIN_TIMEOUT_S to wait longer",
        file=sys.stderr,
    )
    for name in missing:
        log = args.log_dir / f"ray-{name}.log"
        if log.exists():
            print(f"slurm: {name} has tried to join; its log: {log}", file=sys.stderr)
        else:
            print(
                f"slurm: {name} has not started Ray; is the node up, and does its container start?",
                file=sys.stderr,
            )
    return 1


def connect(address: str, left: Callable[[], bool]) -> bool:
    """Joins the cluster as a driver. Returns False if no time is left. Ray's head needs a few seconds to start."""
    while left():
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        except ConnectionError:
            time.sleep(1)
        else:
            return True
    return False


def wait(nodes: list[str], left: Callable[[], bool]) -> list[str]:
    """Waits until all nodes have joined or no time is left. Returns the missing nodes."""
    while True:
        alive = {node["NodeName"] for node in ray.nodes() if node["Alive"]}
        missing = [name for name in nodes if name not in alive]
        if not missing or not left():
            return missing
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
