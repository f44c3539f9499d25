"""Lets megatron-core run without a GPU: requests for a CUDA device get the CPU device.

megatron-core calls `torch.cuda.current_device()`, `device="cuda"` and `.cuda()`, and compares `Tensor.type()` with
"torch.cuda.FloatTensor". The code paths used here need no GPU, so this file redirects these requests, without a copy of
the library. The table of replaced functions is in slime.bridges.torch. On a machine with a GPU, this file does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from slime import bridges
from slime.bridges.torch import PATCHES

_CPU = torch.device("cpu")
_NAMES_OF_DEVICES = frozenset({torch.device, str})
_thread = threading.local()


def _on_cpu(value: Any) -> Any:
    """Returns `value`, or the CPU device if `value` names a CUDA device."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _CPU
    return value


class _CudaRequestsToCpu(TorchFunctionMode):
    """Rewrites the arguments of torch functions that name a CUDA device or a CUDA tensor type.

    torch calls it for each operation, and a step of a tiny model has ten thousand. Most calls have neither keywords nor
    an argument that names a device, so they must be short.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.device:  # a torch.device object alone needs no GPU
            return func(*args, **kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type:
            if len(args) == 1 and not kwargs:  # `Tensor.type()` without arguments: return the name for a GPU
                return func(*args).replace("torch.", "torch.cuda.", 1)
            args = tuple(a.replace("torch.cuda.", "torch.") if isinstance(a, str) else a for a in args)
        if not _NAMES_OF_DEVICES.isdisjoint(map(type, args)):
            args = tuple(_on_cpu(a) for a in args)
        if not kwargs:
            return func(*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        return func(*args, **kwargs)


class _InOrder:
    """Replaces a CUDA stream or event. Work on the CPU runs in program order, so no method waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _InOrder | None = None) -> _InOrder:
        return event or self

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = wait_event = wait_stream = synchronize = _nothing


class _CpuGenerators:
    """Replaces `torch.cuda.default_generators`: every index returns the CPU generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def with_numbers(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `all_to_all_single` that accepts its split sizes as tensors. Megatron converts them to numbers only when
    it copies them from a GPU. The mode above cannot do this, because it is off during the backward."""

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        sizes = ("output_split_sizes", "input_split_sizes")
        numbers = {k: v.tolist() for k in sizes if isinstance(v := kwargs.get(k), torch.Tensor)}
        return exchange(*args, **kwargs | numbers)

    return all_to_all_single


def gathers_any_size(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `all_gather` for tensors whose first axes differ: one broadcast per rank. NCCL supports this and gloo
    does not."""

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, mine, group=group, **kwargs)
        for rank, part in enumerate(parts):
            if rank == dist.get_rank(group):
                part.copy_(mine)
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)
        return None

    return all_gather


def scatters_any_size(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `reduce_scatter` for tensors whose first axes differ: one sum per rank. NCCL supports this and gloo does
    not."""

    def reduce_scatter(out: torch.Tensor, parts: list[torch.Tensor], group: Any = None, **kwargs: Any) -> Any:
        if len({part.shape for part in parts}) == 1:
            return scatter(out, parts, group=group, **kwargs)
        for rank, part in enumerate(parts):
            total = part.clone()
            if part.numel():
                dist.all_reduce(total, group=group)
            if rank == dist.get_rank(group):
                out.copy_(total)
        return None

    return reduce_scatter


def cpu(_: object) -> Callable[..., object]:
    """Returns a function that returns the CPU device."""
    return _answer(_CPU)


def nothing(_: object) -> Callable[..., object]:
    """Returns a function that does nothing."""
    return _answer(None)


def zero(_: object) -> Callable[..., object]:
    """Returns a function that returns 0."""
    return _answer(0)


def true(_: object) -> Callable[..., object]:
    """Returns a function that returns True."""
    return _answer(True)


def in_order(_: object) -> type:
    """Returns a class of streams and events that do not wait."""
    return _InOrder


def only_stream(_: object) -> Callable[..., object]:
    """Returns a function that returns the only stream."""
    return _answer(_InOrder())


def cpu_generators(_: object) -> object:
    """Returns the generators per device, which are all the CPU's generator."""
    return _CpuGenerators()


def cpu_rng_state(_: object) -> Callable[..., torch.Tensor]:
    """Returns `get_rng_state` of the CPU's generator."""
    return lambda device=None: torch.get_rng_state()


def set_cpu_rng_state(_: object) -> Callable[..., None]:
    """Returns `set_rng_state` of the CPU's generator."""
    return lambda state, device=None: torch.set_rng_state(state)


def cpu_seed(_: object) -> Callable[[int], object]:
    """Returns `manual_seed` of the CPU's generator."""
    return lambda seed: torch.manual_seed(seed)


def install_cpu_redirect() -> None:
    """Redirects CUDA requests of this process to the CPU. Does nothing if CUDA is available, or in a repeated call.

    Functions of `torch.cuda` are replaced once per process (slime.bridges.torch). A torch function mode rewrites device
    arguments. torch keeps this mode per thread, so call this function first in every thread that runs Megatron.
    """
    if torch.cuda.is_available():
        return
    for patch in PATCHES:
        bridges.apply(patch)
    if not hasattr(_thread, "mode"):
        _thread.mode = _CudaRequestsToCpu()
        _thread.mode.__enter__()
