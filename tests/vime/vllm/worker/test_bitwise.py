"""Tests vLLM's layers with the operators of rl_kernel.invariant: modules of a real model without replacement, and
names of vLLM that are strings. tests/e2e/examples/test_train_bitwise.py has whole runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

import vllm

OLDEST = Path(sys.prefix, "vllm-oldest", "vllm")
SOURCES = [Path(vllm.__file__).parent, *([OLDEST] if OLDEST.is_dir() else [])]
PROGRAM = """
from types import SimpleNamespace
import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vime.vllm.worker import bitwise
import sys, tempfile
from slime.config.sections.kernels import BITWISE_OPERATORS
from vllm.model_executor.custom_op import op_registry_oot

bitwise.register(("norm",))
assert list(op_registry_oot) == ["RMSNorm"]
bitwise.register(BITWISE_OPERATORS)
bitwise.register(BITWISE_OPERATORS)
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.v1.sample.sampler import Sampler
import rl_kernel.invariant as invariant

with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
    initialize_model_parallel(1)
    ours = nn.ModuleList([RMSNorm(32), SiluAndMul(), MergedColumnParallelLinear(32, [48, 48], bias=False)])
    bitwise.require(ours, BITWISE_OPERATORS)
    norm, activation, product = ours
    nn.init.normal_(product.weight)
    x = torch.randn(5, 32)
    assert torch.equal(product(x)[0], invariant.linear(x, product.weight))
    assert torch.equal(activation(product(x)[0]), invariant.swiglu(product(x)[0]))
    normed, total = norm(x, x)
    assert torch.equal(total, 2 * x) and torch.equal(normed, invariant.rms_norm(2 * x, norm.weight, 1e-6))
    runner, other = (SimpleNamespace(sampler=Sampler(mode)) for mode in ("processed_logprobs", "raw_logprobs"))
    for one in (runner, other, SimpleNamespace(sampler=None)):
        bitwise.use_log_probs(one)
    sampler = runner.sampler.topk_topp_sampler
    tokens, log_probs = sampler(x.clone(), {}, None, None)
    assert torch.equal(log_probs, invariant.log_softmax(x)) and tokens.shape == (5,)
    assert torch.equal(runner.sampler.compute_logprobs(x), invariant.log_softmax(x))
    assert other.sampler.topk_topp_sampler(x.clone(), {}, None, None)[1] is None
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob, states
    from vllm.v1.worker.gpu.sample.sampler import Sampler as NewerSampler

    ids = torch.tensor([[3, 0], [1, 31], [2, 2], [7, 9], [30, 4]], dtype=torch.int32)
    for module in (logprob, prompt_logprob):
        assert torch.equal(module.compute_token_logprobs(x, ids), invariant.log_softmax(x).gather(1, ids.long()))
    scaled, rows = x.clone(), torch.tensor([2, 0, 1, 2, 1], dtype=torch.int32)
    states.apply_temperature(scaled, rows, torch.tensor([0.0, 1.0, 0.7]))
    assert torch.equal(scaled, x / torch.tensor([0.7, 1.0, 1.0, 0.7, 1.0])[:, None])
    nothing_asked = SimpleNamespace(needs_logits_processing=np.zeros(3, dtype=bool))
    rows = rows.numpy()
    others = (None, None, rows, None, None, None, rows)
    processed = NewerSampler.apply_sampling_params(nothing_asked, x.bfloat16(), *others)
    assert torch.equal(processed, x.bfloat16().float())
    layer = type("Glm4MoE", (nn.Module,), {})()
    layer.gate = nn.Linear(32, 8, bias=False)
    layer.gate.weight.data.copy_(product.weight[:8])
    bitwise.adapt(layer, BITWISE_OPERATORS)
    assert torch.equal(layer.gate(x), invariant.router_logits(x, product.weight[:8]))
    bitwise.require(nn.ModuleList([norm, layer.gate]), BITWISE_OPERATORS)
    others = nn.ModuleList([*ours, GeluAndMul(), ReplicatedLinear(32, 8, bias=False)])
    try:
        bitwise.require(others, BITWISE_OPERATORS)
    except ValueError as error:
        print(error)
"""

RANK_PROGRAM = """
import sys
import torch
from torch import nn
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from slime.config.sections.kernels import BITWISE_OPERATORS
from vime.vllm.worker import bitwise

rank, store = int(sys.argv[1]), sys.argv[2]
bitwise.register(BITWISE_OPERATORS)
from vllm.model_executor.layers.linear import RowParallelLinear
import rl_kernel.invariant as invariant
from rl_kernel.invariant.layers import product

with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=2))):
    init_distributed_environment(2, rank, f"file://{store}", rank, "gloo")
    initialize_model_parallel(2)
    torch.manual_seed(0)
    whole, bias, x = torch.randn(24, 64), torch.randn(24), torch.randn(7, 64)
    plain, biased = RowParallelLinear(64, 24, bias=False), RowParallelLinear(64, 24)
    bitwise.require(nn.ModuleList([plain, biased]), BITWISE_OPERATORS)
    half = slice(32 * rank, 32 * rank + 32)
    for layer in (plain, biased):
        layer.weight.data.copy_(whole[:, half])
    biased.bias.data.copy_(bias)
    parts = [product(a, b, dtype=torch.float64) for a, b in zip(x.chunk(2, 1), whole.chunk(2, 1))]
    wanted = (parts[0] + parts[1]).float()
    for rows in (slice(None), slice(3, 4)):
        assert torch.equal(plain(x[rows, half])[0], wanted[rows])
        assert torch.equal(biased(x[rows, half])[0], wanted[rows] + bias)
    without = RowParallelLinear(64, 24, bias=False, reduce_results=False)
    shared = nn.ModuleList()
    shared.shared_experts = nn.ModuleList()
    shared.shared_experts.down_proj = without
    bitwise.require(nn.ModuleList([plain, shared]), BITWISE_OPERATORS)
    without.weight.data.copy_(whole[:, half])
    assert torch.equal(without(x[:, half])[0], torch.zeros_like(wanted) if rank else wanted)
    splits = RowParallelLinear(64, 24, bias=False, input_is_parallel=False)
    try:
        bitwise.require(nn.ModuleList([plain, without, splits]), BITWISE_OPERATORS)
    except ValueError as error:
        print(error)
"""


def started(program: str, *argv: str) -> subprocess.Popen[str]:
    env = os.environ | {"VLLM_HOST_IP": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        env=env | {"VLLM_DIST_IDENT": f"test-bitwise-{os.getpid()}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_layer_of_two_ranks_adds_them_in_their_order(tmp_path: Path) -> None:
    ranks = [started(RANK_PROGRAM, str(rank), str(tmp_path / "store")) for rank in (0, 1)]
    try:
        said = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (output, errors) in zip(ranks, said, strict=True):
        assert process.returncode == 0, errors[-3000:]
        assert (
            "got 1 (a row-parallel layer without its sum), 2 (a row-parallel layer that splits its input)"
            in output
        )


@pytest.mark.slow
def test_layers_of_vllm_are_ours_and_others_are_listed() -> None:
    process = started(PROGRAM)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    assert (
        "every operator of the engine from rl_kernel.invariant, got 3 (GeluAndMul), "
        "4 (a replicated layer that is no router, or a router with a bias)" in output
    )


@pytest.mark.parametrize("source", SOURCES, ids=["installed", "oldest"][: len(SOURCES)])
def test_classes_that_are_named_by_a_string_are_in_vllm(source: Path) -> None:
    from vime.vllm.worker.bitwise.check import _PASSES_ON
    from vime.vllm.worker.bitwise.layers import LAYERS, OPERATORS

    folder = source / "model_executor"
    files = [*folder.glob("layers/*.py"), *folder.glob("layers/rotary_embedding/*.py")]
    files += [*folder.glob("layers/fused_moe/*.py"), *folder.glob("layers/fused_moe/r*/*.py")]
    models = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mimo", "glm4_moe")
    files += [folder / "models" / f"{name}.py" for name in models]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    known = set(re.findall(r"^class (\w+)", text, re.MULTILINE)) | set(
        re.findall(r"import \w+ as (\w+)", text)
    )
    known |= set(re.findall(r"^from .* import (\w+ as \w+)", text, re.MULTILINE)) | {"ModuleList", "Qwen3MLP"}
    assert not {*_PASSES_ON, *LAYERS, *OPERATORS} - known
    assert "self.do_llama_4_scaling = " in text


@pytest.mark.parametrize(
    ("found", "window", "reason"),
    [
        ((-1, -1), None, None),
        ((23, 0), 24, None),
        ((0, 0), 1, None),
        ((23, 23), 24, "a window with later keys"),
    ],
)
def test_the_window_of_a_layer_on_a_gpu_counts_its_own_key(monkeypatch, found, window, reason) -> None:
    """vLLM's pair has the numbers of keys before and after a query."""
    from vime.vllm.worker.bitwise import flash

    calls = []
    monkeypatch.setattr(flash.invariant, "paged_attention", lambda *inputs: calls.append(inputs))
    layer = object.__new__(flash.PagedFlashAttention)  # its __init__ needs a GPU
    settings = {
        "num_heads": 4,
        "head_size": 16,
        "scale": 0.25,
        "kv_cache_dtype": "auto",
        "sliding_window": found,
    }
    vars(layer).update(settings, logits_soft_cap=0, sinks=None, alibi_slopes=None)
    metadata = SimpleNamespace(block_table=0, query_start_loc=0, seq_lens=0, max_query_len=1)
    layer.attend(torch.zeros(2, 64), torch.zeros(3, 2, 16, 32), metadata, torch.zeros(2, 64))
    assert calls[0][-1] == window and layer.not_computed == reason


def test_experts_have_the_factor_of_their_sum() -> None:
    """`adapt` moves the factor from vLLM's runner to the weights of the experts, once."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from vime.vllm.worker import bitwise
    from vime.vllm.worker.bitwise.check import not_ours
    from vime.vllm.worker.bitwise.experts import InvariantExperts

    runner = object.__new__(MoERunner)  # its __init__ needs vLLM's groups of ranks
    torch.nn.Module.__init__(runner)
    method = object.__new__(InvariantExperts)
    experts = SimpleNamespace(quant_method=method, routed_scaling_factor=1.0)
    plain = SimpleNamespace(is_sequence_parallel=False, skip_final_all_reduce=False)
    transforms = {"routed_input_transform": None, "routed_output_transform": None}
    vars(runner).update(routed_experts=experts, routed_scaling_factor=2.5, moe_config=plain, **transforms)
    runner.weight = torch.nn.Parameter(torch.zeros(1))
    assert not_ours(runner) == ["the model (a scaled sum of experts)"]
    for _ in range(2):
        bitwise.adapt(runner, ("product",))
        assert (experts.routed_scaling_factor, runner.routed_scaling_factor) == (2.5, 1.0)
    assert not_ours(runner) == []
    plain.skip_final_all_reduce = True
    assert not_ours(runner) == ["the model (experts without their sum over ranks)"]
