"""The device of this process, as plug-ins ask for it: a CUDA device, or the CPU.

The device is the one that torch sees in this process. In the rollout manager that is the CPU, because engines and
trainers have the GPUs.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
Device = int | str | torch.device | None


def device_type() -> str:
    """Returns "cuda", or "cpu" in a process without a CUDA device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def accelerator_module() -> ModuleType:
    """Returns torch.cuda, or torch.cpu in a process without a CUDA device."""
    return torch.cuda if device_type() == "cuda" else torch.cpu


def current_device() -> int | str:
    """Returns the index of the current CUDA device, or "cpu"."""
    return torch.cuda.current_device() if device_type() == "cuda" else "cpu"


def device_count() -> int:
    """Returns the number of CUDA devices that this process sees."""
    return torch.cuda.device_count()


def device_name(index: Device = None) -> str:
    """Returns the name that torch reads, such as "cuda:0" or "cpu"."""
    if device_type() == "cpu":
        return "cpu"
    if index is None:
        index = torch.cuda.current_device()
    return str(torch.device("cuda", index) if isinstance(index, int) else torch.device(index))


def device(index: Device = None) -> torch.device:
    """Returns the torch device of `device_name`."""
    return torch.device(device_name(index))


def set_device(index: int | str | torch.device) -> None:
    """Sets the current CUDA device. It does nothing on a CPU."""
    if device_type() == "cuda":
        torch.cuda.set_device(index)


def synchronize(device_arg: Device = None) -> None:
    """Waits until the device has done its work."""
    if device_type() == "cuda":
        torch.cuda.synchronize(device_arg)


def empty_cache() -> None:
    """Returns unused memory of torch's allocator to the device."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def ipc_collect() -> None:
    """Frees GPU memory that was shared with processes that no longer use it."""
    if device_type() == "cuda":
        torch.cuda.ipc_collect()


def mem_get_info(device_arg: Device = None) -> tuple[int, int]:
    """Returns the free and the whole memory of the device in bytes. Raises RuntimeError on a CPU."""
    if device_type() == "cpu":
        raise RuntimeError(
            "mem_get_info must be called in a process with a CUDA device, got none; ask psutil"
        )
    return torch.cuda.mem_get_info(device_arg)


def memory_allocated(device_arg: Device = None) -> int:
    """Returns the bytes of the device's tensors, or 0 on a CPU."""
    return torch.cuda.memory_allocated(device_arg) if device_type() == "cuda" else 0


def memory_reserved(device_arg: Device = None) -> int:
    """Returns the bytes that torch's allocator holds, or 0 on a CPU."""
    return torch.cuda.memory_reserved(device_arg) if device_type() == "cuda" else 0


def get_device_properties(device_arg: Device = None) -> object:
    """Returns torch's properties of the device, or None on a CPU."""
    if device_type() == "cpu":
        return None
    return torch.cuda.get_device_properties(current_device() if device_arg is None else device_arg)


def current_stream(device_arg: Device = None) -> torch.cuda.Stream | None:
    """Returns the current stream, or None on a CPU."""
    return torch.cuda.current_stream(device_arg) if device_type() == "cuda" else None


def stream(stream_arg: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Returns a block in which work goes to the stream. Without a stream, the block changes nothing."""
    return nullcontext() if stream_arg is None else torch.cuda.stream(stream_arg)


def manual_seed(seed: int) -> None:
    """Seeds torch's generators on the CPU and on each CUDA device."""
    torch.manual_seed(seed)


def process_group_backend(default: str = "nccl") -> str:
    """Returns the backend for torch.distributed: `default`, but gloo for nccl in a process without a CUDA device."""
    return "gloo" if default == "nccl" and device_type() == "cpu" else default


def visible_devices_env_key() -> str:
    """Returns the name of the variable that lists the devices of a process."""
    return VISIBLE


def resolve_visible_device_id(physical_device_id: int | float | str) -> int:
    """Returns the index in this process of a device of the host, or of an index that CUDA_VISIBLE_DEVICES has. Raises
    RuntimeError for any other number."""
    text = str(physical_device_id).strip()
    wanted = text if not text.replace(".", "", 1).isdigit() else str(int(float(text)))
    listed = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    if wanted in listed:
        return listed.index(wanted)
    if wanted.isdigit() and (not listed or int(wanted) < len(listed)):
        return int(wanted)
    raise RuntimeError(
        f"physical_device_id must be a device of {VISIBLE}={','.join(listed)}, or an index in it, got "
        f"{physical_device_id!r}; pass a device that this process sees"
    )
