"""Compares one layer of GLM-5 in its real shape, in bfloat16 on a GPU, with float32, for sequences with more tokens
than a query sees. It prints time and memory."""

from __future__ import annotations

import time

import pytest
import torch
from architectures import ARCHITECTURES
from megatron_cases import make_config

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, stage_output, unwrap
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

pytestmark = pytest.mark.gpu

LENGTHS = [5000, 37, 3000]
PUBLISHED = ARCHITECTURES["glm-5"].config_fields() | {"model_type": "glm_moe_dsa"}
HF = PUBLISHED | {"num_hidden_layers": 1, "vocab_size": 1024}
"""The first layer is dense."""


@pytest.fixture
def single_rank(tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


@pytest.mark.parametrize("topk", [2048, 8192])
def test_a_layer_of_glm5(single_rank, capsys, topk):
    """With 8192 selected tokens, the attention is dense. bfloat16 may select other tokens where scores are close."""
    generator = torch.Generator("cuda").manual_seed(0)
    models = {
        d: build_model(HF | {"index_topk": topk}, make_config(params_dtype=d))
        for d in ("float32", "bfloat16")
    }
    with torch.no_grad():
        pairs = [unwrap(model).named_parameters() for model in models.values()]
        for (name, exact), (_, half) in zip(*pairs, strict=True):
            if exact.dim() == 1:
                exact.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                exact.normal_(std=0.02, generator=generator)
            half.copy_(exact)
            exact.copy_(half)
    tokens = torch.randint(0, 1024, (sum(LENGTHS),), device="cuda", generator=generator)
    upstream = torch.randn(len(tokens), 1, HF["hidden_size"], device="cuda", generator=generator).bfloat16()
    outputs = {}
    for dtype, model in models.items():
        for _ in range(2):  # the first pass compiles kernels
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start, before = time.perf_counter(), torch.cuda.memory_allocated()
            output = stage_output(model, tokens, packed_layout(token_slice(LENGTHS), "cuda"))
            output.backward(upstream.to(output.dtype))
            torch.cuda.synchronize()
            seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
        outputs[dtype] = output.detach().float()
        with capsys.disabled():
            print(f"\n{dtype}, top {topk}: {seconds * 1e3:.0f} ms, peak {peak / 2**20:.0f} MiB")
    assert (outputs["bfloat16"] - outputs["float32"]).norm() < 0.05 * outputs["float32"].norm()
