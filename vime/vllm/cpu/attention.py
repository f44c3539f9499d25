"""Attention of image tokens to all tokens of their image (Gemma 3), for engines on CPUs.

vLLM's attention on CPUs is causal for such models. Its kernel has a flag per request: causal, or not. So a request with
images is passed to the kernel as several requests with the same key-value cache: text, image, text. An image's queries
see all keys up to the image's last token. vLLM writes the keys of a step before the attention, so the
later keys of the image exist. The step must have the whole image (--disable-chunked-mm-input).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

Part = tuple[int, int, bool]
"""Token indices [start, stop) in a sequence, and whether they see the whole part."""


def register() -> None:
    """Registers the backend in vLLM's table. A step without images computes what vLLM's own backend computes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ImageAttentionBackend.__qualname__}")


class ImageAttentionBackend(CPUAttentionBackend):
    """vLLM's attention on CPUs, with images that see themselves in both directions."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @staticmethod
    def get_builder_cls() -> type[ImageMetadataBuilder]:
        return ImageMetadataBuilder


class ImageMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes the kernel's inputs, with a request per image."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        return super().build(common_prefix_len, split_images(common_attn_metadata), fast_build)


def split_images(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Returns the metadata of a step with several requests for each request that computes image tokens."""
    images = metadata.mm_req_doc_ranges
    if not images or not any(images.values()):
        return metadata
    bounds, stops = metadata.query_start_loc_cpu.tolist(), metadata.seq_lens.tolist()
    parts = [
        list(_split(stop - (last - first), stop, images.get(request, ())))
        for request, (first, last, stop) in enumerate(zip(bounds, bounds[1:], stops, strict=False))
    ]
    if not any(whole for of_request in parts for _, _, whole in of_request):
        return metadata
    counts = torch.tensor([len(of_request) for of_request in parts])
    flat = [part for of_request in parts for part in of_request]
    lengths = torch.tensor([stop - start for start, stop, _ in flat], dtype=torch.int32)
    first_query = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return replace(
        metadata,
        num_reqs=len(flat),
        query_start_loc=first_query,
        query_start_loc_cpu=first_query,
        seq_lens=torch.tensor([stop for _, stop, _ in flat], dtype=torch.int32),
        max_query_len=int(lengths.max()),
        block_table_tensor=metadata.block_table_tensor.repeat_interleave(counts, dim=0),
        causal=torch.tensor([not whole for _, _, whole in flat], dtype=torch.int32),
    )


def _split(start: int, stop: int, images: Iterable[tuple[int, int]]) -> Iterator[Part]:
    """Yields the parts of the tokens [start, stop) of a sequence. `images` has the first and the last token of each
    image."""
    for first, last in sorted(images):
        begin, end = max(first, start), min(last + 1, stop)
        if begin >= end:
            continue
        if start < begin:
            yield start, begin, False
        yield begin, end, True
        start = end
    if start < stop:
        yield start, stop, False
