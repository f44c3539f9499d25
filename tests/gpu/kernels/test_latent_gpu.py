"""Compares one layer of DeepSeek-V3 in its real shape, in bfloat16 on a GPU, with the padded form in float32."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES
from megatron_cases import make_config

from slime.data.token_slice import token_slice
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, stage_output, unwrap
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import read_decoder

pytestmark = pytest.mark.gpu

LENGTHS = [1500, 37, 2048, 511]
PUBLISHED = ARCHITECTURES["deepseek-v3"].config_fields() | {"model_type": "deepseek_v3"}
HF = PUBLISHED | {"num_hidden_layers": 1, "vocab_size": 1024}
"""The first layer is dense."""


@pytest.fixture
def single_rank(tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


def test_a_layer_of_the_real_shape(single_rank, capsys):
    generator = torch.Generator("cuda").manual_seed(0)
    models = {}
    for dtype in ("float32", "bfloat16"):
        models[dtype] = build_model(HF, make_config(params_dtype=dtype))
    pairs = [unwrap(model).named_parameters() for model in models.values()]
    with torch.no_grad():
        for (_, exact), (_, half) in zip(*pairs, strict=True):
            if exact.dim() == 1:
                exact.fill_(1.0)
            else:
                exact.normal_(std=0.02, generator=generator)
            half.copy_(exact)
            exact.copy_(half)
    tokens = torch.randint(0, 1024, (sum(LENGTHS),), device="cuda", generator=generator)
    # The loss is not a sum of squares, because the last norm keeps that sum and its gradient would be zero.
    upstream = torch.randn(len(tokens), 1, HF["hidden_size"], device="cuda", generator=generator).bfloat16()
    outputs, kept = {}, 0
    for dtype, model in models.items():
        before = torch.cuda.memory_allocated()
        outputs[dtype] = stage_output(model, tokens, packed_layout(token_slice(LENGTHS), "cuda"))
        kept = torch.cuda.memory_allocated() - before
        outputs[dtype].backward(upstream.to(outputs[dtype].dtype))
    exact, half = (outputs[dtype].float() for dtype in ("float32", "bfloat16"))
    assert (half - exact).norm() < 0.02 * exact.norm()
    for (name, a), (_, b) in zip(*(unwrap(m).named_parameters() for m in models.values()), strict=True):
        assert (b.main_grad - a.main_grad).norm() <= 0.05 * a.main_grad.norm(), name
        assert a.main_grad.any() or name.startswith("output_layer"), name  # the head comes after the layers
    decoder = read_decoder(HF)
    width = decoder.layers[0].attention.kept + 2 * decoder.hidden + 2 * decoder.ffn
    estimate = 2 * len(tokens) * width
    with capsys.disabled():
        print(f"\nkept by one layer: {kept / 2**20:.0f} MiB, estimated {estimate / 2**20:.0f} MiB")
    assert kept == pytest.approx(estimate, rel=0.15)
