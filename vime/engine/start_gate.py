"""A server whose engine shares a GPU with a trainer starts beside it, and takes the GPU once the trainer has its part.

An engine measures what memory is left when it takes its GPU, so it has to come second. Most of its start is other work,
though (on an H200 host 45 s of imports and configuration in two processes, one after the other), and need not wait.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

VARIABLE = "VIME_WAITS_FOR"
"""Names the file whose appearance opens the gate. A server that starts later, in place of a dead one, finds it open."""
_POLL_S = 0.05


def install(file: str) -> None:
    """Have the workers of this process wait for `file` before they take their devices. May run more than once."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    take_device = WorkerWrapperBase.init_device
    if hasattr(take_device, "wraps"):
        return

    @functools.wraps(take_device)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not Path(file).exists():
            print(f"the engine waits for {file} before it takes its device", flush=True)
        while not Path(file).exists():  # whoever should write it and dies takes this process along
            time.sleep(_POLL_S)
        return take_device(self, *args, **kwargs)

    init_device.wraps = take_device  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device  # type: ignore[method-assign]
