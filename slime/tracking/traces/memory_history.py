"""Implements --record-memory-history: a snapshot of a trainer rank's GPU memory, with each allocation's call stack.

https://docs.pytorch.org/memory_viz shows the file. PyTorch records the history, so it contains the memory of tensors,
but not the memory of NCCL or another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.config import Config

ENTRIES = 100_000
"""Number of newest allocations and frees that PyTorch keeps. With their stacks, they take tens of MB."""


class MemoryHistory:
    """Records the memory of the trainer rank with the name `rank`, from its creation until the snapshot is written.

    The snapshot is written when the rank is out of memory, after --memory-snapshot-num-steps rollouts, or after the
    last rollout of the run.
    """

    def __init__(self, config: Config, rank: str) -> None:
        flags = config.debug
        self._records = flags.record_memory_history
        self._steps, self._rollouts, self._trained = (
            flags.memory_snapshot_num_steps,
            config.data.num_rollout,
            0,
        )
        folder = Path(flags.memory_snapshot_dir or Path(config.logging.run_dir) / "profile")
        self._path = folder.resolve() / f"{rank}-memory.pickle"
        if self._records:
            from torch.cuda import memory

            memory._record_memory_history(max_entries=ENTRIES, stacks="python")

    @contextmanager
    def around(self) -> Iterator[None]:
        """Writes the snapshot if the block is out of memory."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError:
            self._write()
            raise

    def trained(self, rollout_id: int) -> None:
        """Counts a trained rollout, and writes the snapshot if it is due."""
        self._trained += 1
        if self._trained == self._steps or rollout_id + 1 == self._rollouts:
            self._write()

    def _write(self) -> None:
        """Writes the snapshot once and stops recording."""
        if not self._records:
            return
        from torch.cuda import memory

        self._records = False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        memory._dump_snapshot(str(self._path))
        memory._record_memory_history(enabled=None)
        print(f"memory snapshot after {self._trained} rollouts: {self._path}", flush=True)
