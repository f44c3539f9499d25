"""Frees memory that an engine on CPUs does not need: pages of an empty cache, kernels for past numbers of tokens, a
compiler.

vLLM fills its key-value cache with zeros at the start, so all pages are resident, and its sleep mode needs a GPU. An
engine drops its cache when it pauses for the trainer, and when it has new weights. Nothing reads the cache's old
content again, so its pages are returned to the system. A later write to an address gets a new page of zeros. A rollout
with short responses writes to few pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from slime.system.imports import refused
from vime.vllm.cpu.engine import EAGER_VARIABLE

if TYPE_CHECKING:
    import torch
    from vllm._custom_ops import CPUDNNLGEMMHandler as Product
    from vllm.engine.protocol import EngineClient

MAX_KERNELS_PER_PRODUCT = 4
"""Number of kernels that one layer keeps for its matrix product, each for one number of tokens.

vLLM's own number is 32. A kernel takes 0.3 MiB. An update of weights drops all kernels, and the number of running
requests changes at almost each step.
"""
_MADV_DONTNEED = 4
"""Advice number of madvise(2): pages of private memory become zeros and use no memory."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Stops vLLM's first import from loading torch's compiler in this context, if nothing is compiled.

    vLLM loads the compiler to extend its list of operators, which takes 38 MiB and 0.9 s of a core. vLLM also works
    with a torch that has no compiler.
    """
    with contextlib.ExitStack() as stack:
        if os.environ.get(EAGER_VARIABLE) == "1":
            stack.enter_context(refused("torch._inductor.lowering"))
        yield


async def return_cache(engine: EngineClient) -> None:
    """Returns the memory of the key-value cache of a paused engine to the system.

    Does nothing if a request still has keys and values in the cache, or on a GPU.
    """
    if not await engine.is_paused():
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and await engine.reset_prefix_cache():
        await engine.collective_rpc("return_memory")


def with_few_kernels(create: Callable[[torch.Tensor, int], Product]) -> Callable[..., Product]:
    """Wraps vLLM's `create_onednn_mm` so that it keeps at most `MAX_KERNELS_PER_PRODUCT` kernels for a product."""

    @functools.wraps(create)
    def create_onednn_mm(
        weight: torch.Tensor, primitive_cache_size: int = MAX_KERNELS_PER_PRODUCT
    ) -> Product:
        return create(weight, min(primitive_cache_size, MAX_KERNELS_PER_PRODUCT))

    return create_onednn_mm


def trim() -> None:
    """Returns memory that this process has freed to the system."""
    _LIBC.malloc_trim(0)


def drop_pages(tensors: Iterable[torch.Tensor | list[torch.Tensor]]) -> None:
    """Sets the storages of `tensors` to zero and releases the memory of their whole pages.

    The state of a layer may be a list of tensors. The first and last page of a storage may also hold other data, so
    they stay unchanged.
    """
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
