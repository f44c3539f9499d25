"""Compares vLLM's attention kernel for CPUs with a mask: tokens of an image see the whole image, with and without a
sliding window, and in a step that begins inside an image or after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vime.vllm.cpu.attention import ImageAttentionBackend, register, split_images

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"),
    reason="the compiled part of this vLLM does not load",
)
HEADS, GROUPS, SIZE, BLOCK, BLOCKS = 4, 2, 32, 32, 3
STARTS, STOPS = (0, 20, 32), (70, 50, 33)
"""The step computes these tokens of three requests. The third request decodes."""
IMAGES = {0: [(20, 28), (5, 13)], 1: [(10, 25)], 2: [(3, 11)]}


class Step:
    """Random queries, and keys and values in vLLM's cache."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query, self.key, self.value = (
            [torch.randn(stop, heads, SIZE, generator=generator) for stop in STOPS]
            for heads in (HEADS, GROUPS, GROUPS)
        )
        self.isa = _get_attn_isa(torch.float32, BLOCK, SIZE, "auto")
        table = torch.arange(len(STOPS) * BLOCKS, dtype=torch.int32).view(-1, BLOCKS)
        self.caches = torch.zeros(len(table.flatten()), GROUPS, 2 * BLOCK, SIZE).chunk(2, dim=2)
        for blocks, key, value in zip(table, self.key, self.value, strict=True):
            index = torch.arange(len(key))
            slots = blocks[index // BLOCK].long() * BLOCK + index % BLOCK
            ops.cpu_attn_reshape_and_cache(key, value, *self.caches, slots, self.isa)
        lengths = [stop - start for start, stop in zip(STARTS, STOPS, strict=True)]
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        self.metadata = CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=torch.tensor(STOPS, dtype=torch.int32),
            num_reqs=len(STOPS),
            num_actual_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=max(STOPS),
            block_table_tensor=table,
            slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
            mm_req_doc_ranges=IMAGES,
        )

    def computed(self, window: int) -> Tensor:
        """Returns the kernel's output [tokens of the step, heads, size]."""
        metadata = split_images(self.metadata)
        query = torch.cat([x[start:] for x, start in zip(self.query, STARTS, strict=True)])
        out = torch.empty_like(query)
        causal = {"causal": False, "dynamic_causal": metadata.causal}
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=metadata.num_reqs,
            num_heads=HEADS,
            num_kv_heads=GROUPS,
            head_dim=SIZE,
            seq_lens=metadata.seq_lens,
            dtype=torch.float32,
            query_start_loc=metadata.query_start_loc,
            sliding_window_size=window,
            isa=self.isa,
            enable_kv_split=True,
            **causal,
        )
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.caches[0],
            value_cache=self.caches[1],
            output=out,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=SIZE**-0.5,
            alibi_slopes=None,
            sliding_window=window,
            block_table=metadata.block_table_tensor,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
            **causal,
        )
        return out

    def expected(self, window: int, *, whole: bool = True) -> Tensor:
        """Returns the output with a mask. `whole`: tokens see their whole image."""
        found = []
        for request, (start, stop) in enumerate(zip(STARTS, STOPS, strict=True)):
            index = torch.arange(stop)
            mask = index[:, None] >= index
            for first, last in IMAGES[request] if whole else ():
                mask[first : last + 1, first : last + 1] = True
            if window > 0:
                mask &= index > index[:, None] - window
            q, k, v = (x[request].transpose(0, 1) for x in (self.query, self.key, self.value))
            out = scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)
            found.append(out[0].transpose(0, 1)[start:])
        return torch.cat(found)


@pytest.mark.parametrize("window", [-1, 16, 20])
def test_tokens_of_an_image_see_the_whole_image(window: int) -> None:
    step = Step()
    expected = step.expected(window)
    torch.testing.assert_close(step.computed(window), expected, rtol=0, atol=2e-6)
    assert (expected - step.expected(window, whole=False)).abs().max() > 0.5


def test_a_step_without_image_tokens_is_unchanged() -> None:
    metadata = Step().metadata
    for images in (None, {}, {0: [], 1: []}, {1: [(3, 11)], 2: [(3, 11)]}):
        one = replace(metadata, mm_req_doc_ranges=images)
        assert split_images(one) is one


def test_the_backend_is_vllms_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is ImageAttentionBackend
    assert ImageAttentionBackend.supports_mm_prefix()
