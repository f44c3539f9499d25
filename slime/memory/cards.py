"""Memory and compute capability of the GPUs of this host, from NVIDIA's driver: per card, and memory per process.

A container may hide the processes of the host from the driver. Then a card has bytes that no visible process owns.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class CardMemory:
    """Memory of a card in bytes."""

    index: int
    total: int
    used: int
    """Bytes in use by all processes, without the memory that the driver reserves. `nvidia-smi` prints the same
    number."""
    by_process: dict[int, int] = field(default_factory=dict)
    """Process id -> bytes."""


class Cards:
    """The cards that this process may see, in the order of CUDA_VISIBLE_DEVICES. Empty without a driver."""

    def __init__(self) -> None:
        self._nvml, self._handles = _open()

    def __len__(self) -> int:
        return len(self._handles)

    def read(self, *, processes: bool = False) -> list[CardMemory]:
        """Returns the current memory. `processes` adds the memory per process, which takes longer. A card that does not
        answer is left out."""
        found = []
        for index, handle in self._handles.items():
            try:
                total, used = self._memory(handle)
                found.append(
                    CardMemory(index, total, used, self._read_processes(handle) if processes else {})
                )
            except self._nvml.NVMLError:
                continue
        return found

    def capabilities(self) -> list[tuple[int, int]]:
        """Returns the compute capability of each card, such as (9, 0)."""
        read = self._nvml.nvmlDeviceGetCudaComputeCapability
        return [read(handle) for handle in self._handles.values()]

    def _memory(self, handle: object) -> tuple[int, int]:
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        except self._nvml.NVMLError:  # an old driver
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(info.total), int(info.used)

    def _read_processes(self, handle: object) -> dict[int, int]:
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return {process.pid: int(process.usedGpuMemory or 0) for process in running}


def _open() -> tuple[ModuleType, dict[int, object]]:
    """Returns NVML and each card's handle by its index. The NVML bindings come with Ray."""
    pynvml = _bindings()
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles: dict[int, object] = {
            index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)
        }
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return pynvml, handles
        names = [name.strip() for name in visible.split(",") if name.strip()]
        by_name = {str(index): index for index in handles}
        by_name |= {_text(pynvml.nvmlDeviceGetUUID(handle)): index for index, handle in handles.items()}
        return pynvml, {by_name[name]: handles[by_name[name]] for name in names if name in by_name}
    except pynvml.NVMLError:  # no driver, or a driver that does not answer
        return pynvml, {}


def _bindings() -> ModuleType:
    """Returns NVML's bindings, a single file in Ray's package. It is loaded without Ray, whose import takes a
    second."""
    package = find_spec("ray")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    path = Path(package.origin).parent / "_private" / "thirdparty" / "pynvml" / "pynvml.py"
    spec = spec_from_file_location("slime_pynvml", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # the module looks itself up in sys.modules
    spec.loader.exec_module(module)
    return module


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
