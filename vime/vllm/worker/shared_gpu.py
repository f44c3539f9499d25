"""Changes to a server whose engine shares a GPU with a trainer, and perhaps with other jobs.

An engine measures the free memory when it starts, so the trainer must take its memory first. The server starts at the
same time as the trainer, does its imports and its configuration, and then waits until the trainer has its memory.

When the engine sleeps, another process may take memory at the same time. vLLM compares the free memory of the whole GPU
before and after and would raise an error. Here this is no error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerWrapperBase

GATE_VARIABLE = "VIME_GATE"
"""Names the file whose appearance lets a server take its device. Without it nothing is waited for."""
SLEEPS_VARIABLE = "VIME_SLEEPS"
LESS_IS_FREE = "Memory usage increased after sleeping."
"""What vLLM says. By then the engine sleeps, and nothing but a log line would follow."""
_POLL_S = 0.05


def install(gate: str | None, *, sleeps: bool) -> None:
    """For the workers of this process: wait for `gate` before they take their devices, and sleep beside others. May run
    more than once."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    take_device: Callable[..., object] = WorkerWrapperBase.init_device
    if hasattr(take_device, "in_turn"):
        return

    @functools.wraps(take_device)
    def init_device(self: WorkerWrapperBase, *args: object, **kwargs: object) -> object:
        if gate is not None:
            wait_for(Path(gate))
        if sleeps:
            worker = cast("Worker", self.worker)  # of another class on CPUs, which do not sleep
            worker.sleep = beside_others(worker.sleep)  # type: ignore[method-assign]
        return take_device(self, *args, **kwargs)

    init_device.in_turn = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device  # type: ignore[method-assign]


def wait_for(gate: Path) -> None:
    """Until it is there: whoever should open it either does, or dies and takes this process along."""
    if not gate.exists():
        print(f"the engine waits for {gate} before it takes its device", flush=True)
    while not gate.exists():
        time.sleep(_POLL_S)


def beside_others(sleep: Callable[..., None]) -> Callable[..., None]:
    """`sleep` of a vLLM worker, but others may take memory while it runs."""

    @functools.wraps(sleep)
    def sleep_beside_others(*args: object, **kwargs: object) -> None:
        try:
            sleep(*args, **kwargs)
        except AssertionError as error:
            if str(error) != LESS_IS_FREE:
                raise
            print("the engine sleeps; others on its GPU took more memory meanwhile than it gave", flush=True)

    return sleep_beside_others
