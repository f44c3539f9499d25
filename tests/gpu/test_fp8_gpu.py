"""Tests weights in blocks of fp8 on GPUs: the comparison with an update, and engines of vLLM, with experts too.

For fp8, vLLM's kernels without FlashInfer, DeepGEMM and Marlin are enough: CUTLASS or Triton for linear layers, Triton
for experts. INT4 needs Marlin.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_engine import TOKENS, train, trained_models, versions_of
from fp8_cases import layer
from megatron_cases import tiny_checkpoint
from offline_engine import offline_engine
from quantize import find_routers, quantization_config, quantize_checkpoint
from rank_processes import on_ranks

from slime.memory.cards import Cards
from vime.vllm.worker.live_quantized import quantized_pieces

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 256, "intermediate_size": 256}
EXPERTS = SHAPE | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
"""Shape whose products have multiples of 128 on both sides, as vLLM's GPU kernels need."""
ROUNDING = 0.2
"""Largest mean difference over tokens, in nats. Activations are rounded too. An update moves log-probs by more than
1."""


def test_compiled_codes_are_the_nearest() -> None:
    """vLLM compiles its quantisation. Another order of products and divisions must still give the nearest values."""
    weight = torch.randn(1000, 1300, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    linear = torch.compile(layer, dynamic=True)(weight.bfloat16(), [1000])
    (piece,) = quantized_pieces(linear, [1000])
    assert piece.holds(weight)
    linear.weight.view(torch.uint8)[700, 600] += 1
    assert not piece.holds(weight)


@pytest.mark.parametrize(("name", "shape"), [("llama", SHAPE), ("qwen2-moe", EXPERTS)])
def test_an_engine_takes_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: dict[str, int]
) -> None:
    """tests/e2e/engines/test_engine_fp8.py does the same on CPUs. The dense model's updates have checksums, with
    which the engine compares every live tensor. Experts in fp8 are not compared."""
    trained = trained_models(
        tmp_path, [name], shapes={name: shape}, dtype="bfloat16", checksums=shape is SHAPE
    )
    (before, first), (after, second) = versions_of(trained, name)
    settings = {"dtype": "bfloat16", "quantization": "fp8_per_block"}
    with offline_engine(tmp_path / name, tmp_path / f"{name}-weights", monkeypatch, **settings) as engine:
        mlp = engine.worker.model_runner.model.model.layers[1].mlp
        rounded = [weight for weight in mlp.parameters() if weight.dtype == torch.float8_e4m3fn]
        assert len(rounded) >= 2
        assert (engine.log_probs(TOKENS) - before).abs().mean() < ROUNDING
        for update, expected, old in ((second, after, before), (first, before, after)):
            engine.take(update)
            assert (engine.log_probs(TOKENS) - expected).abs().mean() < ROUNDING
            assert (engine.log_probs(TOKENS) - old).abs().mean() > 2 * ROUNDING


HEADS = SHAPE | {"head_dim": 128, "tie_word_embeddings": False}
ROUTED = HEADS | {"moe_intermediate_size": 256, "num_experts": 8, "mlp_only_layers": [0]}
OF_SCHEME = {"fp8": 0.3, "int4": 0.6}
"""As `ROUNDING`, for an engine that keeps the scheme of its checkpoint."""
MARLIN = """if True:
    import torch
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    rows, size, group = 16, 256, 32
    codes = torch.zeros(size // 8, size, dtype=torch.int32, device="cuda")
    order = torch.empty(0, dtype=torch.int32, device="cuda")
    weight = ops.gptq_marlin_repack(codes, order, size, size, 4)
    x = torch.ones(rows, size, dtype=torch.bfloat16, device="cuda")
    scales = torch.ones(size // group, size, dtype=torch.bfloat16, device="cuda")
    locks = torch.zeros(1024, dtype=torch.int32, device="cuda")
    given = (x, None, weight, None, scales, None, None, None, order, order, locks)
    out = ops.marlin_gemm(*given, scalar_types.uint4b8, size_m=rows, size_n=size, size_k=size)
    print(out.sum().item())
"""
"""Computes an int4 product with vLLM 0.26. vLLM does not read the status of its launch, so the sum raises the error."""


def missing_kernels(stderr: str) -> str | None:
    """Returns the reason to skip int4 if the errors of `MARLIN` mean that its kernels are for other GPUs, else None."""
    lacks = "no kernel image is available" in stderr
    return "this build of vLLM has no Marlin kernels for this GPU" if lacks else None


@functools.cache
def without_marlin() -> str | None:
    """Returns `missing_kernels` after a run of `MARLIN`. The run is a subprocess, because a CUDA error would make later
    tests of this process fail."""
    done = subprocess.run([sys.executable, "-c", MARLIN], capture_output=True, text=True, timeout=300)
    return missing_kernels(done.stderr)


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
@pytest.mark.parametrize(("kind", "shape"), [("qwen3", HEADS), ("qwen3_moe", ROUTED)])
def test_an_engine_keeps_the_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shape: dict[str, object], scheme: str
) -> None:
    """Updates have checksums, so the engine loads each update twice and compares all live tensors."""
    if scheme == "int4" and (reason := without_marlin()):
        pytest.skip(reason)
    tiny_checkpoint(tmp_path / "plain", kind, **shape)
    given = quantization_config(scheme, routers=find_routers(tmp_path / "plain"))
    quantize_checkpoint(tmp_path / "plain", tmp_path / "tiny", given)
    on_ranks(train, tmp_path, ["tiny"], "bfloat16", True, ranks=1)
    trained = tmp_path, torch.load(tmp_path / "trained.pt", weights_only=False)
    (before, first), (after, second) = versions_of(trained, "tiny")
    with offline_engine(
        tmp_path / "tiny", tmp_path / "tiny-weights", monkeypatch, dtype="bfloat16"
    ) as engine:
        assert (engine.log_probs(TOKENS) - before).abs().mean() < OF_SCHEME[scheme]
        for update, expected, old in ((second, after, before), (first, before, after)):
            engine.take(update)
            assert (engine.log_probs(TOKENS) - expected).abs().mean() < OF_SCHEME[scheme]
            assert (engine.log_probs(TOKENS) - old).abs().mean() > 2 * OF_SCHEME[scheme]
        with pytest.raises(RuntimeError, match="live weights must equal the trainer's"):
            engine.take(second, load=False)


def test_the_driver_reports_the_compute_capabilities() -> None:
    """`vime train` refuses fp8 on older GPUs before it starts. This process has no context for the check."""
    counted = range(torch.cuda.device_count())
    assert Cards().capabilities() == [torch.cuda.get_device_capability(index) for index in counted]
