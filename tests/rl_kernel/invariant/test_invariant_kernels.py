"""Tests the Triton kernels of rl_kernel.invariant (in the interpreter without a GPU), and their code for Hopper GPUs.
The attention is in test_attention_kernel.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from rl_kernel.invariant import kernels
from rl_kernel.invariant.kernels import product

pytestmark = pytest.mark.usefixtures("device", "products_in_float64")


@pytest.mark.parametrize("tile", product.TILES, ids=lambda tile: "x".join(map(str, tile[:5])))
def test_a_row_of_a_product_alone_and_among_others(tile, monkeypatch):
    x, weight, bias = torch.randn(70, 96).half(), torch.randn(130, 96).half(), torch.randn(130).half()
    together = kernels.linear(x, weight, bias, tile)
    for i in (0, 5, 63, 64, 69):
        assert torch.equal(together[i : i + 1], kernels.linear(x[i : i + 1], weight, bias, tile))
    true = functional.linear(x.double(), weight.double(), bias.double())
    assert (together - true).abs().max() <= 2**-11 * true.abs().max()
    monkeypatch.setattr(
        product, "count_processors", lambda device: 3
    )  # several programs, each with several parts
    assert torch.equal(together, kernels.linear(x, weight, bias, tile))
    unrounded = kernels.linear(x, weight, bias, tile, torch.float32)
    assert torch.equal(unrounded.half(), together) and not torch.equal(unrounded, together.float())


def test_rows_of_a_product_that_a_tile_cannot_copy():
    """The rows have every second column, 7 columns, or begin at odd elements."""
    x, weight = torch.randn(9, 97).half(), torch.randn(21, 97).half()
    for part in (slice(None, None, 2), slice(7), slice(1, 97)):
        found = kernels.linear(x[:, part], weight[:, part], None)
        assert torch.equal(found, kernels.linear(x[:, part].contiguous(), weight[:, part].contiguous(), None))
        true = functional.linear(x[:, part].double(), weight[:, part].double())
        assert found.shape == (9, 21) and (found - true).abs().max() <= 2**-10 * true.abs().max()
    assert kernels.linear(x[:0], weight, None).shape == (0, 21)


def test_the_tile_follows_the_shape():
    """The shapes are those of decoding, a batch of prompts and training, on a GPU with 132 processors."""
    chosen = [product.choose_tile(rows, 6144, 132)[:2] for rows in (8, 64, 128, 8192)]
    assert chosen == [(16, 32), (64, 64), (64, 128), (128, 256)]
    assert product.choose_tile(8192, 6144, 132, 4)[:2] == (128, 128)  # in float32, a larger tile is too large


def test_rms_norm():
    x, weight = torch.randn(9, 96).half(), torch.randn(96).half()
    together, same = kernels.rms_norm(x, weight, 1e-6)
    assert same is x and torch.equal(together[4:5], kernels.rms_norm(x[4:5], weight, 1e-6)[0])
    true = functional.rms_norm(x.double(), (96,), weight.double(), 1e-6)
    assert (together - true).abs().max() <= 2**-10 * true.abs().max()


def test_rms_norm_of_heads_in_place():
    """The heads are a part of wider rows, as in an engine."""
    x, weight = torch.randn(5, 3 * 96).half(), torch.randn(32).half()
    heads = x[:, 96:192].view(5, 3, 32)
    found, _ = kernels.rms_norm(heads, weight, 1e-6)
    assert torch.equal(found, kernels.rms_norm(heads.reshape(15, 32), weight, 1e-6)[0].view(5, 3, 32))


def test_rms_norm_of_a_sum():
    x, residual, weight = (
        torch.randn(9, 96).half(),
        torch.randn(9, 192).half()[:, ::2],
        torch.randn(96).half(),
    )
    normed, total = kernels.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-6)[0])


@pytest.mark.parametrize("columns", [7, 8192, 20000])
def test_log_sums(columns):
    logits = torch.randn(5, columns) * 9
    logits[3, 1] = -torch.inf
    top, log_sum = kernels.log_sums(logits)
    for i in range(5):
        assert torch.equal(
            torch.cat((top, log_sum), 1)[i], torch.cat(kernels.log_sums(logits[i : i + 1]), 1)[0]
        )
    assert torch.equal(kernels.log_softmax(logits), (logits - top) - log_sum)
    torch.testing.assert_close(
        (logits - top) - log_sum, logits.double().log_softmax(-1).float(), rtol=2e-6, atol=2e-6
    )
    logits[2, 0] = torch.nan
    assert kernels.log_sums(logits)[1].isnan().flatten().tolist() == [False, False, True, False, False]


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rl_kernel.invariant.kernels.attention import attention_kernel
from rl_kernel.invariant.kernels.product import linear_kernel

def code(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

of = dict.fromkeys
tiles = {"X": "tensordesc<bf16[128, 64]>", "W": "tensordesc<bf16[256, 64]>", "OUT": "tensordesc<bf16[128, 128]>"}
print(code(linear_kernel, tiles | {"BIAS": "*bf16"},
           {"HAS_BIAS": False, "ROWS": 128, "COLUMNS": 256, "INNER": 64, "GROUP": 16, "PROGRAMS": 132,
            "PERSISTENT": True, "HALVES": True}, num_warps=8, num_stages=4))
for window in (0, 100):
    for page in (0, 16):
        print("=" * 9)
        types = of(["Q", "K", "V", "OUT"], "*bf16") | {"LSE": "*fp32", "scale": "fp32"}
        print(code(attention_kernel, types | of(["FIRST_QUERY", "FIRST_KEY", "LENGTH", "TABLE"], "*i32"),
                   {"PAGE": page, "SHARED": 4, "SIZE": 64, "ROWS": 64, "KEYS": 64, "HAS_LSE": True, "WINDOW": window},
                   num_warps=4, num_stages=2))
"""


@pytest.mark.slow
def test_the_code_for_a_hopper_gpu_computes_packed_and_paged_queries_alike():
    """Only the addresses differ: both have the same float32 instructions in the same order, which a window does not
    change."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    product, *attentions = done.stdout.split("=" * 9)
    assert "wgmma" in product and "atom" not in done.stdout
    steps = [re.findall(r"\b(?:fma|mul|add|sub|ex2|max|div|wgmma)\S*f32\S*", text) for text in attentions]
    assert len(steps) == 4 and len(steps[0]) > 100 and all(found == steps[0] for found in steps)
