"""Measures the memory of a process: its resident set, and each phase's peak on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")


def resident_peak_gib() -> float | None:
    """Returns the largest resident set of this process since its start, in GiB, or None without /proc.

    Pages that it shares with other processes (libraries, Ray's object store) count in full. The value is VmHWM, because
    a process inherits the value of `getrusage` from its parent.
    """
    if not STATUS.exists():
        return None
    line = next(x for x in STATUS.read_text(encoding="ascii").splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**20


def device_memory(device: torch.device) -> int | None:
    """Returns the total bytes of memory of a GPU, or None for another device."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.mem_get_info(device)[1]


def reserved_gib(device: torch.device) -> dict[str, float]:
    """Returns the metric of the memory that PyTorch's allocator holds on a GPU, with cached blocks. The result is empty
    for other devices."""
    if device.type != "cuda":
        return {}
    import torch

    return {"perf/trainer_reserved_gib": torch.cuda.memory_reserved(device) / 2**30}


def leave_free(device: torch.device, least: float) -> None:
    """Keeps PyTorch's allocator from the last `least` bytes of a GPU. Has no effect on other devices.

    Without a limit, its cached blocks fill the whole GPU, and later allocations by other code fail. On an 80 GiB card,
    NCCL could not make the communicator of the first gradient norm. At the limit, the allocator releases its cached
    blocks and tries again.
    """
    if (total := device_memory(device)) is not None:
        import torch

        torch.cuda.set_per_process_memory_fraction(max(0.0, 1.0 - least / total), device)


class PeakMemory:
    """Measures the largest number of bytes allocated at once during each phase. Phases may be nested.

    `read()` returns the peak since the last `reset()`. Both read the bookkeeping of PyTorch's allocator on the host, so
    neither waits for the GPU. Other code of this process that reads `torch.cuda.max_memory_allocated` gets the peak
    since the last start or end of a phase.
    """

    def __init__(self, read: Callable[[], int], reset: Callable[[], None]) -> None:
        self._read, self._reset = read, reset
        self._running: list[str] = []
        self._peaks: dict[str, int] = {}

    @classmethod
    def from_cuda(cls, device: torch.device) -> PeakMemory:
        """Measures bytes in tensors that PyTorch allocated on `device`, without cached blocks, NCCL and the CUDA
        context."""
        import torch

        def read() -> int:
            # max_memory_allocated builds and sorts a dictionary of hundreds of values for the same number
            peak: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
            return peak

        return cls(read, lambda: torch.cuda.reset_peak_memory_stats(device))

    def enter(self, name: str) -> None:
        self._note()
        self._running.append(name)

    def leave(self, name: str) -> None:
        self._note()
        self._running.remove(name)

    def flush(self) -> dict[str, int]:
        """Returns {phase: peak bytes} of the phases that ran since the last call."""
        self._note()
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _note(self) -> None:
        peak = self._read()
        for name in self._running:
            self._peaks[name] = max(peak, self._peaks.get(name, 0))
        self._reset()
