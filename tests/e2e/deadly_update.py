"""Runs `vime train` and sends SIGKILL to its engine in the middle of the weight update to version 1. No test could
hit this moment from outside.

    python deadly_update.py PART FLAGS OF vime train...

The engine dies after it has agreed to the update, right before the driver sends part PART (1, 2, ...) of the weights.
The signal goes to the engine core's process, or to the server if there is no such process. The rest is the real
driver.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from urllib.parse import urlsplit

import psutil

from vime.cli import main
from vime.vllm.control import VllmControl
from vime.vllm.versions import server_module

PART = int(sys.argv[1])
updates, parts = 0, 0
start, send = VllmControl.start_weight_update, VllmControl.update_weights


def counted_start(control: VllmControl) -> None:
    global updates, parts
    updates, parts = updates + 1, 0
    start(control)


def deadly_send(control: VllmControl, update_info: dict[str, Any]) -> None:
    global parts
    parts += 1
    if (updates, parts) == (2, PART):  # the first update sends version 0
        kill_engine(urlsplit(control.url).port)
    send(control, update_info)


def kill_engine(port: int | None) -> None:
    (server,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if {server_module(), str(port)} <= set(process.cmdline())
        and "vime.pool.supervise" not in process.cmdline()
    ]
    cores = [child for child in server.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    victim = (cores or [server])[0]
    print(f"deadly_update: SIGKILL to {' '.join(victim.cmdline())[:60]}", flush=True)
    os.kill(victim.pid, signal.SIGKILL)


VllmControl.start_weight_update = counted_start
VllmControl.update_weights = deadly_send

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[2:]]))
