"""Starts the processes of a test's ranks from a fork server that has imported their modules, which saves 5 s per
process."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

_TRAINER = ["slime.megatron_backend.step.trainer", "torch._dynamo", "pytest", "transformers"]
"""Modules for each process: torch imports the second when it loads a weight, and the tests import the others."""
_OPERATORS = ["rl_kernel", "triton.language", "pytest"]
"""Modules for the tests of tests/rl_kernel, which must not reach other tests with Triton's interpreter on."""
_served: list[str] = []
"""Modules that the present server has imported."""


def forks() -> Any:
    """Returns a multiprocessing context whose processes have imported the trainer, or the operators with Triton's
    interpreter.

    The processes have the server's environment. A new server starts only if the interpreter is switched on or off.
    """
    global _served
    wanted = _OPERATORS if os.environ.get("TRITON_INTERPRET") else _TRAINER
    if _served is not wanted:
        # Megatron asks for GPUs when it is imported. Without this, a process that is forked later cannot use them.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # as Python's own tests do
        multiprocessing.set_forkserver_preload(wanted)
        _served = wanted
    return multiprocessing.get_context("forkserver")


def on_ranks(work: Callable[..., None], *args: Any, ranks: int) -> None:
    """Calls `work(rank, *args)` in `ranks` processes of `forks` and waits for them."""
    forks()
    multiprocessing.start_processes(_call, args=(work, *args), nprocs=ranks, start_method="forkserver")


def _call(rank: int, work: Callable[..., None], *args: Any) -> None:
    gc.freeze()  # without this, each checkpoint of Megatron makes the collector look at all imported objects
    torch.set_num_threads(1)
    work(rank, *args)


def killed(work: Callable[..., None], of_each: Sequence[Sequence[Any]]) -> None:
    """Calls `work(*args)` for each entry of `of_each` in a separate process, all at once. SIGKILL must end each
    process."""
    context = forks()
    processes = [context.Process(target=work, args=tuple(args)) for args in of_each]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, process.exitcode


def kill_when_seen(folder: Path, pattern: str) -> None:
    """Sends SIGKILL to this process as soon as `folder` has a file with that name."""

    def watch() -> None:
        while not list(folder.glob(pattern)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def in_layouts(
    layouts: Mapping[str, Mapping[str, Any]], rank: int, ranks: int, root: Path
) -> Iterator[tuple[str, Any]]:
    """Yields each layout's name and configuration. A layout's groups exist until the next layout."""
    from megatron_cases import make_config

    from slime.megatron_backend.parallel import destroy_parallel, init_parallel

    for layout, sizes in layouts.items():
        config = make_config(**sizes)
        init_parallel(rank, ranks, config, init_method=f"file://{root}/store-{layout}", local_rank=rank)
        yield layout, config
        destroy_parallel()
