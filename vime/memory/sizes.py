"""Determines the sizes of the machine for a plan: options of `vime plan`, the table of --gpu, or this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime.config import Config
from slime.config.config_file import split_argv, with_config_files
from slime.hardware import HARDWARE
from slime.memory.cards import Cards
from slime.memory.host import host_memory, host_total
from slime.plan.fit import MachineSizes
from slime.plan.host_phases import SYSTEM
from slime.plan.units import GIB

GPU_MEMORY, HOST_MEMORY = "--gpu-memory-gib", "--host-memory-gib"
"""Options of `vime plan` that are not flags of a run."""
_MEANING = {
    GPU_MEMORY: "memory of one GPU",
    HOST_MEMORY: "memory of one host, or the limit of its container",
}


@dataclass(frozen=True)
class RequestedSizes:
    """The values of the two options, in GiB."""

    gpu: float | None = None
    host: float | None = None


def take_sizes(argv: Sequence[str]) -> tuple[list[str], RequestedSizes]:
    """Splits the two options off the flags of a run: (the flags, their values). The last use counts.

    Raises ValueError unless a value is a number above 0.
    """
    flags, values = list[str](), dict[str, float]()
    tokens = iter(argv)
    for token in tokens:
        written, equals, value = token.partition("=")
        name = written.replace("_", "-")
        if name in _MEANING:
            values[name] = gib(value if equals else next(tokens, ""), name)
        else:
            flags.append(token)
    return flags, RequestedSizes(values.get(GPU_MEMORY), values.get(HOST_MEMORY))


def gib(text: str, name: str = GPU_MEMORY) -> float:
    """Returns the value of an option in GiB. Raises ValueError unless it is a number above 0."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ValueError(
            f"{name} must be a number above 0, got {text or 'none'}; give the GiB of {_MEANING[name]}"
        )
    return size


def for_gpus(flags: Sequence[str], size: float | None) -> list[str]:
    """Returns `flags`, with --device cuda added if `size` is given and the flags have no device."""
    named = any(group.name == "device" for group in with_config_files(split_argv(flags)))
    return [*flags, *(() if size is None or named else ("--device", "cuda"))]


def requested_bytes(c: Config, size: float | None) -> float | None:
    """Returns the bytes of GPUs of `size` GiB, or of the GPU of --gpu, or None without both. Raises ValueError for a
    run without GPUs."""
    if size is None:
        return None if c.cluster.gpu is None else HARDWARE[c.cluster.gpu].memory_gib * GIB
    if c.cluster.device != "cuda":
        raise ValueError(
            f"{GPU_MEMORY} must go with --device cuda, got --device {c.cluster.device}; leave out one of the two"
        )
    return size * GIB


def device_memory(c: Config) -> int | None:
    """Returns the bytes of the smallest GPU of this machine, or None without a GPU. Makes no CUDA context."""
    if c.cluster.device != "cuda":
        return None
    return min((card.total for card in Cards().read()), default=None)


def machine_sizes(c: Config, sizes: RequestedSizes | None = None, *, here_only: bool = False) -> MachineSizes:
    """Returns the requested sizes. Without them, or with `here_only`, returns the sizes of this machine, if it has a
    GPU."""
    sizes = sizes or RequestedSizes()
    asked, here = None if here_only else requested_bytes(c, sizes.gpu), device_memory(c)
    if sizes.host is not None:
        return MachineSizes(asked or here, sizes.host * GIB)
    if here is None:
        return MachineSizes(asked)
    now = host_memory()
    return MachineSizes(asked or here, host_total(), SYSTEM if now is None else now.used)
