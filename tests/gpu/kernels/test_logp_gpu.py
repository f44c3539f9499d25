"""Tests `logp` on a GPU: accuracy at full vocabularies, memory, repeatability, no synchronisation, CUDA graphs."""

import math

import pytest
import torch

from rl_kernel import configure, linear_logp, logp
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.logp.cases import CASES, LARGE, LogpCase, formula

pytestmark = pytest.mark.gpu

CONTRACT = CONTRACTS["logp"]
QWEN = LogpCase("qwen", 512, 151936, vocab_size=151669)


def upstream(tokens):
    return torch.randn(2, tokens, generator=torch.Generator("cuda").manual_seed(3), device="cuda")


def run(op, logits, targets, **kwargs):
    """Returns the outputs, and the gradient of `(g * log_probs + h * entropy).sum()`."""
    leaf = logits.detach().clone().requires_grad_()
    log_probs, entropy = op(leaf, targets, **kwargs)
    g, h = upstream(len(targets))
    (log_probs * g + entropy * h).sum().backward()
    return log_probs.detach(), entropy.detach(), leaf.grad


def triton(logits, targets, **kwargs):
    return logp(logits, targets, impl="triton", return_entropy=True, **kwargs)


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, dtype, truncated):
    logits, targets = case.inputs(dtype, "cuda")
    temperature = torch.linspace(0.5, 1.5, case.tokens, device="cuda")
    kept = case.kept(targets, most=300) if truncated else None
    actual = run(
        triton,
        logits,
        targets,
        temperature=temperature,
        vocab_size=case.vocab_size,
        keep_mask=kept,
        inplace_backward=True,
    )
    truth = run(
        formula, logits.double(), targets, temperature=temperature, vocab_size=case.vocab_size, kept=kept
    )
    name = str(dtype).removeprefix("torch.")
    bounds = [CONTRACT.outputs[name]] * 2 + [CONTRACT.gradients[name]]
    for got, want, tolerance in zip(actual, truth, bounds, strict=True):
        assert max_error(got, want) <= tolerance.bound(want)
    assert not actual[2][:, case.real :].any()


def test_transposed_logits_and_a_second_stream():
    logits, targets = LogpCase("odd", 33, 5003).inputs(torch.bfloat16, "cuda")
    plain = run(triton, logits, targets)
    turned = logits.t().contiguous().t()
    leaf = turned.detach().requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        log_probs, entropy = triton(leaf, targets)
        g, h = upstream(33)
        (log_probs * g + entropy * h).sum().backward()
    torch.cuda.synchronize()
    # The strides decide which thread adds which columns.
    torch.testing.assert_close((log_probs.detach(), entropy.detach(), leaf.grad), plain)


def test_more_than_2_31_logits():
    """The last rows have offsets that need more than 32 bits."""
    tokens, vocab = 70000, 32768
    logits = torch.zeros(tokens, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 10.0
    targets = torch.full((tokens,), 5, device="cuda")
    leaf = logits.requires_grad_()
    log_probs = logp(leaf, targets, inplace_backward=True, impl="triton")
    assert log_probs[0].item() == pytest.approx(-math.log(vocab), rel=1e-6)
    want = 10 - math.log(math.exp(10) + vocab - 1)
    assert log_probs[-1].item() == pytest.approx(want, rel=1e-6)
    log_probs.sum().backward()
    assert leaf.grad[-1, 5].item() == pytest.approx(1 - math.exp(want), rel=2**-8)


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("in_place", [False, True])
def test_memory(in_place, truncated):
    logits, targets = QWEN.inputs(torch.bfloat16, "cuda")
    kept = QWEN.kept(targets, most=100) if truncated else None
    leaf = logits.requires_grad_()
    g, h = upstream(QWEN.tokens)

    def peak(step):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = step()
        torch.cuda.synchronize()
        return out, torch.cuda.max_memory_allocated() - before

    options = {"vocab_size": QWEN.real, "keep_mask": kept, "inplace_backward": in_place}
    outputs, forward = peak(lambda: triton(leaf, targets, **options))
    _, backward = peak(lambda: torch.autograd.backward(outputs, (g, h)))
    small = 2**20 + (0 if kept is None else 64 * len(kept.ids))
    assert forward < small
    assert backward < small + (0 if in_place else logits.nbytes)


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
def test_same_bits_every_time(truncated):
    logits, targets = QWEN.inputs(torch.bfloat16, "cuda")
    kept = QWEN.kept(targets, most=1000) if truncated else None
    first = run(triton, logits, targets, temperature=0.9, keep_mask=kept)
    for _ in range(3):
        again = run(triton, logits, targets, temperature=0.9, keep_mask=kept)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_no_synchronisation():
    logits, targets = QWEN.inputs(torch.bfloat16, "cuda")
    temperature = torch.full((QWEN.tokens,), 0.8, device="cuda")
    g, h = upstream(QWEN.tokens)
    kept = QWEN.kept(targets)
    for keep_mask in (None, kept):
        for _ in range(2):  # the first call compiles
            leaf = logits.detach().requires_grad_()
            torch.cuda.set_sync_debug_mode("error")
            try:
                outputs = logp(
                    leaf,
                    targets,
                    temperature=temperature,
                    vocab_size=QWEN.real,
                    keep_mask=keep_mask,
                    return_entropy=True,
                )
                torch.autograd.backward(outputs, (g, h))
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("return_entropy", [False, True])
def test_linear_logp_with_a_kept_set(return_entropy):
    """The kernels over the tiles of `linear_logp` are right and repeatable, and nothing waits for the device."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 256, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(32000, 256, generator=generator, device="cuda") / 16).bfloat16()
    case = LogpCase("linear", 300, 32000, vocab_size=31990)
    targets = torch.randint(case.real, (300,), generator=generator, device="cuda")
    kept = case.kept(targets, most=300)
    grads = upstream(300)[: 1 + return_entropy].unbind()

    def step(op, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        outputs = op(*leaves)
        return *(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, grads)

    def ours(hidden, weight):
        # A third of the logits fit: some tiles are kept, some are computed again.
        workspace = 300 * (4 * 256 + 512 + 12000 * 6)
        options = {"vocab_size": case.vocab_size, "keep_mask": kept, "logits_dtype": "float32"}
        out = linear_logp(
            hidden, weight, targets, workspace_bytes=workspace, return_entropy=return_entropy, **options
        )
        return out if return_entropy else (out,)

    def truth(hidden, weight):
        outputs = formula(hidden @ weight.t(), targets, vocab_size=case.vocab_size, kept=kept)
        return outputs[: 1 + return_entropy]

    first = step(ours, torch.bfloat16)  # this call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step(ours, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    contract = CONTRACTS["linear_logp"]
    bounds = [contract.outputs["float32"]] * (1 + return_entropy) + [contract.gradients["bfloat16"]] * 2
    for got, want, bound in zip(first, step(truth, torch.float64), bounds, strict=True):
        assert max_error(got, want) <= bound.bound(want)


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
def test_a_cuda_graph_replays_it(truncated):
    case = LogpCase("graph", 64, 32000)
    static, targets = case.inputs(torch.bfloat16, "cuda")
    kept = case.kept(targets) if truncated else None
    g, h = upstream(case.tokens)

    def step():
        leaf = static.detach().requires_grad_()
        outputs = triton(leaf, targets, keep_mask=kept)
        (grad,) = torch.autograd.grad(outputs, leaf, (g, h))
        return [*(out.detach() for out in outputs), grad]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    static.copy_(case.inputs(torch.bfloat16, "cuda", seed=9)[0])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_bad_values_on_a_device():
    """In auto mode, a bad value gives NaN or -inf for its token and no memory fault. In strict mode it is an error."""
    logits = torch.zeros(4, 8, device="cuda")
    targets = torch.tensor([0, 2**40, -7, 3], device="cuda")
    kept = KeptTokens.from_lists([[0, 2**35, -9], [], [], [1, 2]], "cuda")
    out = logp(logits, targets, keep_mask=kept)
    assert out[0].item() == 0.0 and out[1:3].isnan().all() and out[3].item() == -math.inf
    configure("strict")
    try:
        with pytest.raises(ValueError, match=r"targets must lie in \[0, 8\)"):
            logp(logits, targets)
        with pytest.raises(ValueError, match=r"keep_mask.ids must lie in \[0, 8\)"):
            logp(logits, targets % 8, keep_mask=kept)
        with pytest.raises(ValueError, match="temperature must be finite and be > 0"):
            logp(logits, targets % 8, temperature=torch.tensor([1.0, 0.0, 1.0, 1.0], device="cuda"))
    finally:
        configure()
