"""Tests the linear operators on a GPU: accuracy, memory bounds, repeats, no synchronisation, CUDA graphs, strict
mode. For all operators: when Triton compiles."""

import itertools
from functools import cache
from pathlib import Path

import pytest
import torch

from rl_kernel import configure, grpo_loss, linear_logp, linear_token_loss, telemetry
from rl_kernel.mode import using
from rl_kernel.ops.linear_logp.cases import (
    LARGE,
    LinearCase,
    acceptance_violations,
    compute_truth,
    contract_violations,
    evaluate,
    plain,
)

pytestmark = pytest.mark.gpu

MIB = 2**20
BF16 = torch.bfloat16
WIDE = LinearCase("wide", 1664, 512, 151936, vocab_size=151669)


def layer_of(case, dtype):
    hidden, weight, targets = case.inputs(dtype, "cuda")
    return {"hidden": hidden, "weight": weight}, targets


def fast(**kwargs):
    return linear_logp(impl="triton", return_entropy=True, **kwargs)


@cache
def samples(tokens):
    """Returns differences from the old log-probs, and advantages. They are kept, so that a captured call makes no
    tensor."""
    return torch.randn(2, tokens, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


def one_pass(layer, targets, *, weight_grad=None, workspace_bytes=1536 * MIB):
    """Returns loss and gradients of the clipped objective with an entropy bonus."""
    tokens = len(targets)
    old, advantages = samples(tokens)
    mask = torch.ones(tokens, device="cuda")

    def token_loss(log_probs, entropy, rows):
        old_log_probs = log_probs.detach() + 0.1 * old[rows]
        return grpo_loss(
            log_probs, old_log_probs, advantages[rows], mask[rows], float(tokens),
            entropy=entropy, entropy_coef=0.01, impl="triton",
        )  # fmt: skip

    leaves = {name: tensor.detach().requires_grad_() for name, tensor in layer.items()}
    result = linear_token_loss(
        **leaves, targets=targets, token_loss=token_loss, return_entropy=True, impl="triton",
        weight_grad=weight_grad, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    result.loss.backward()
    grads = {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": result.loss.detach(), "log_probs": result.log_probs, "entropy": result.entropy, **grads}


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_accuracy_of_outputs_and_gradients(case, dtype):
    layer, targets = layer_of(case, dtype)
    options = {"vocab_size": case.vocab_size, "temperature": 0.7}
    truth = compute_truth(layer, targets, **options)
    exact = evaluate(fast, layer, targets, logits_dtype="float32", **options)
    rounded = evaluate(fast, layer, targets, **options)
    assert not contract_violations(exact, truth, dtype, None)
    assert not acceptance_violations([(rounded, evaluate(plain, layer, targets, **options), truth)], dtype)


@pytest.mark.parametrize("uses", ["log_probs", "both"])
@pytest.mark.parametrize("workspace", [64 * MIB, 160 * MIB, 1536 * MIB])
def test_workspace_bounds_the_memory_and_not_the_result(uses, workspace):
    layer, targets = layer_of(WIDE, BF16)
    want = evaluate(fast, layer, targets, uses, vocab_size=WIDE.vocab_size)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = evaluate(fast, layer, targets, uses, vocab_size=WIDE.vocab_size, workspace_bytes=workspace)
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(tensor.numel() * tensor.element_size() for tensor in got.values())
    assert peak - results <= workspace + 2 * MIB
    if workspace < 512 * MIB:
        assert peak - results < WIDE.tokens * WIDE.vocab * 2, "a buffer of all logits"
    for name, value in want.items():
        scale = value.abs().max().clamp(min=1e-6)
        assert (got[name].float() - value.float()).abs().max() <= 0.01 * scale, name


@pytest.mark.parametrize("main_grad", [False, True])
def test_one_pass_bounds_its_memory_and_agrees_over_block_sizes(main_grad):
    layer, targets = layer_of(WIDE, BF16)
    buffers = [torch.zeros(WIDE.vocab, WIDE.hidden, device="cuda") for _ in range(2)]
    want = one_pass(layer, targets, weight_grad=buffers[0] if main_grad else None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bound = 200 * MIB
    got = one_pass(layer, targets, weight_grad=buffers[1] if main_grad else None, workspace_bytes=bound)
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(tensor.numel() * tensor.element_size() for tensor in got.values())
    assert peak - results <= bound + 2 * MIB
    if main_grad:
        assert "d_weight" not in got
        want, got = want | {"d_weight": buffers[0]}, got | {"d_weight": buffers[1]}
    for name, value in want.items():
        scale = value.abs().max().clamp(min=1e-6)
        assert (got[name].float() - value.float()).abs().max() <= 0.01 * scale, name


def test_repeats_are_bitwise_equal_and_wait_for_nothing():
    layer, targets = layer_of(LARGE[1], BF16)
    calls = [lambda: evaluate(fast, layer, targets), lambda: one_pass(layer, targets)]
    first = [call() for call in calls]
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = [call() for call in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for before, after in zip(first, second, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("call", [lambda *a: evaluate(fast, *a), one_pass], ids=["linear_logp", "one pass"])
def test_cuda_graphs(call, dtype):
    layer, targets = layer_of(LARGE[0], dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(layer, targets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(layer, targets)
    layer["hidden"].mul_(0.5)
    graph.replay()
    for name, value in call(layer, targets).items():
        assert torch.equal(captured[name], value), name


def test_overflow_is_repaired_without_the_host():
    hidden, weight, targets = WIDE.inputs(BF16, "cuda")
    layer = {"hidden": hidden[:256] * 60, "weight": weight}
    targets = targets[:256]
    truth = compute_truth(layer, targets, vocab_size=WIDE.vocab_size)
    assert truth["log_probs"].min() < -150
    actual = evaluate(fast, layer, targets, vocab_size=WIDE.vocab_size, logits_dtype="float32")
    error = (actual["log_probs"] - truth["log_probs"]).abs().max()
    assert error <= 1e-5 * truth["log_probs"].abs().max()
    for name in ("d_hidden", "d_weight"):
        off = (actual[name].double() - truth[name]).norm() / truth[name].norm()
        assert off <= 0.01, name


def test_auto_mode_falls_back_to_nothing_here_and_strict_mode_reads_targets():
    layer, targets = layer_of(LARGE[0], BF16)
    telemetry(reset=True)
    linear_logp(**layer, targets=targets)
    counted = telemetry()["linear_logp"]
    assert counted["implementations"] == {"triton": 1} and counted["fallbacks"] == {}
    bad = targets.clone()
    bad[3] = LARGE[0].vocab
    out = linear_logp(**layer, targets=bad)
    assert out.isnan().nonzero().flatten().tolist() == [3]
    with using("strict"), pytest.raises(ValueError, match="targets must lie in"):
        linear_logp(**layer, targets=bad)
    configure()


def test_no_step_after_the_first_compiles(monkeypatch):
    """The steps are those of tests/rl_kernel/test_compilations.py, which records launches without running them. Code
    from Triton's cache on the disk counts too."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "rl_kernel")
    from trainer_steps import SIZES, STARTS, STEPS, Batch
    from triton import knobs

    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(event["repr"])
    )
    first, *others = (Batch(*one) for one in itertools.product(SIZES, STARTS))
    for name, step in STEPS.items():
        step(first)
        known = len(compiled)
        for batch in others:
            step(batch)
            assert compiled[known:] == [], (name, batch.tokens, batch.start)
    torch.cuda.synchronize()
    assert len(compiled) > len(STEPS)
