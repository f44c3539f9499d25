"""What an engine on CPUs does not keep: pages of an empty cache, kernels for past numbers of tokens, a compiler.

vLLM fills its key-value cache with zeros at the start, so all pages are resident, and its sleep mode needs a GPU. An
engine drops its cache when it pauses for the trainer, and when it has new weights. Its pages then hold nothing that is
read again. They go back to the system, which gives a page of zeros to each place that is written later. A rollout with
short responses writes to few of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from slime.imports import refused
from vime.vllm.cpu.engine import EAGER_VARIABLE

if TYPE_CHECKING:
    import torch
    from vllm._custom_ops import CPUDNNLGEMMHandler as Product
    from vllm.engine.protocol import EngineClient

MOST_OF_A_PRODUCT = 4
"""Kernels that one layer keeps for its product of matrices, each for one number of tokens. vLLM asks for 32. One takes
0.3 MiB, an update of weights drops all of them, and the number of running requests changes at almost each step."""
_MADV_DONTNEED = 4
"""madvise(2)'s number: pages of private memory become zeros that take no memory."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """For the first import of vLLM. Where nothing is compiled, it does not load torch's compiler to extend its list of
    operators, which takes 38 MiB and 0.9 s of a core. Where torch has no compiler, vLLM goes without, too."""
    with contextlib.ExitStack() as stack:
        if os.environ.get(EAGER_VARIABLE) == "1":
            stack.enter_context(refused("torch._inductor.lowering"))
        yield


async def return_cache(engine: EngineClient) -> None:
    """Returns the memory of the key-value cache of a paused engine to the system. Does nothing if a request still has
    keys and values there, or on a GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and await engine.is_paused() and await engine.reset_prefix_cache():
        await engine.collective_rpc("return_memory")


def with_few_kernels(create: Callable[[torch.Tensor, int], Product]) -> Callable[..., Product]:
    """vLLM's `create_onednn_mm`, which keeps at most `MOST_OF_A_PRODUCT` kernels for a product."""

    @functools.wraps(create)
    def create_onednn_mm(weight: torch.Tensor, primitive_cache_size: int = MOST_OF_A_PRODUCT) -> Product:
        return create(weight, min(primitive_cache_size, MOST_OF_A_PRODUCT))

    return create_onednn_mm


def trim() -> None:
    """Returns the memory that this process has freed to the system."""
    _LIBC.malloc_trim(0)


def drop_pages(tensors: Iterable[torch.Tensor | list[torch.Tensor]]) -> None:
    """Make zeros of the storages of `tensors` (a layer's state may be several), without memory for whole pages of them.
    The first and the last page, which a storage may share with others, stay as they are."""
    storages = {}
    for layer in tensors:
        for tensor in layer if isinstance(layer, list) else [layer]:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    for begin, size in storages.items():
        first, end = (
            -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE,
            (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if first < end and _LIBC.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) of the key-value cache failed")
