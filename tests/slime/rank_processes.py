"""Processes for the ranks of a test, forked from a server that imported once what they need: 5 s less per process."""

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
"""What each process needs: torch imports the second when a weight is loaded, the tests the others."""
_OPERATORS = ["rl_kernel", "triton.language", "pytest"]
"""What those of tests/rl_kernel need, which Triton's interpreter must not leave to others."""
_served: list[str] = []
"""What the present server has imported."""


def forks() -> Any:
    """A multiprocessing context whose processes have imported the trainer, or with Triton's interpreter the operators.

    Their environment is that of the server, which is a new one only where the interpreter comes or goes.
    """
    global _served
    wanted = _OPERATORS if os.environ.get("TRITON_INTERPRET") else _TRAINER
    if _served is not wanted:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # as Python's own tests do
        multiprocessing.set_forkserver_preload(wanted)
        _served = wanted
    return multiprocessing.get_context("forkserver")


def on_ranks(work: Callable[..., None], *args: Any, ranks: int) -> None:
    """Call `work(rank, *args)` in `ranks` processes of `forks` and wait for them."""
    forks()
    multiprocessing.start_processes(_call, args=(work, *args), nprocs=ranks, start_method="forkserver")


def _call(rank: int, work: Callable[..., None], *args: Any) -> None:
    gc.freeze()  # else each checkpoint of Megatron looks at all that the server imported
    torch.set_num_threads(1)
    work(rank, *args)


def killed(work: Callable[..., None], of_each: Sequence[Sequence[Any]]) -> None:
    """Call `work(*args)` for each of the args in a process of its own, side by side. SIGKILL must end them all."""
    context = forks()
    processes = [context.Process(target=work, args=tuple(args)) for args in of_each]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, process.exitcode


def kill_when_seen(folder: Path, pattern: str) -> None:
    """SIGKILL for this process as soon as `folder` has a file of that name."""

    def watch() -> None:
        while not list(folder.glob(pattern)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def in_layouts(
    layouts: Mapping[str, Mapping[str, Any]], rank: int, ranks: int, root: Path
) -> Iterator[tuple[str, Any]]:
    """The name and the configuration of each layout, whose groups exist until the next one is asked for."""
    from megatron_cases import make_config

    from slime.megatron_backend.parallel import destroy_parallel, init_parallel

    for layout, sizes in layouts.items():
        config = make_config(**sizes)
        init_parallel(rank, ranks, config, init_method=f"file://{root}/store-{layout}", local_rank=rank)
        yield layout, config
        destroy_parallel()
