"""Compares `logp` in Triton (in the interpreter without a GPU) with the float64 formula and the reference."""

import math
from functools import partial

import pytest
import torch

from rl_kernel import logp
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.kept import KeptTokens, kept_grad, kept_stats
from rl_kernel.ops.logp.cases import CASES, LogpCase, formula
from rl_kernel.vocab import VocabShard
from rl_kernel.vocab import logits_grad as reference_grad
from rl_kernel.vocab import row_stats as reference_stats

kernels = pytest.importorskip("rl_kernel.ops.logp.kernels", reason="Triton is not installed")
from hardware_rounding import nearest  # noqa: E402, F401

from rl_kernel.ops.logp import kept_kernels  # noqa: E402

# The interpreter warns of intended values: a first maximum far below any logit, lanes without a row.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTRACT = CONTRACTS["logp"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TINY = LogpCase("tiny", 7, 11)


def run(op, logits, targets, weights=(1, 1), **kwargs):
    """Returns the outputs, and the gradient of `(g * log_probs + h * entropy).sum()`."""
    leaf = logits.detach().clone().requires_grad_()
    log_probs, entropy = op(leaf, targets, **kwargs)
    g, h = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(3)).to(logits.device)
    (weights[0] * (log_probs * g).sum() + weights[1] * (entropy * h).sum()).backward()
    return log_probs.detach(), entropy.detach(), leaf.grad


def triton(logits, targets, **kwargs):
    return logp(logits, targets, impl="triton", return_entropy=True, **kwargs)


def reference(logits, targets, **kwargs):
    return logp(logits, targets, impl="reference", return_entropy=True, **kwargs)


def check(actual, truth, dtype):
    name = str(dtype).removeprefix("torch.")
    bounds = [CONTRACT.outputs[name]] * 2 + [CONTRACT.gradients[name]]
    assert [x.dtype for x in actual] == [torch.float32, torch.float32, dtype]
    for got, want, tolerance in zip(actual, truth, bounds, strict=True):
        assert got.shape == want.shape
        assert max_error(got, want) <= tolerance.bound(want)


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_case_keeps_the_contract(case, dtype, truncated):
    logits, targets = case.inputs(dtype, DEVICE)
    temperature = torch.linspace(0.5, 1.5, case.tokens, device=DEVICE)
    kept = case.kept(targets) if truncated else None
    actual = run(triton, logits, targets, temperature=temperature, vocab_size=case.vocab_size, keep_mask=kept)
    truth = run(
        formula, logits.double(), targets, temperature=temperature, vocab_size=case.vocab_size, kept=kept
    )
    check(actual, truth, dtype)
    assert not actual[2][:, case.real :].any()
    same = run(
        reference, logits, targets, temperature=temperature, vocab_size=case.vocab_size, keep_mask=kept
    )
    check(actual, same, dtype)


@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, None), (None, 1)], ids=str)
@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("temperature", [1.0, 0.7], ids=str)
def test_each_gradient_alone(weights, temperature, truncated):
    """With None, the loss does not use that output, so its gradient is None instead of zeros."""
    logits, targets = TINY.inputs(device=DEVICE)
    kept = TINY.kept(targets) if truncated else None

    def part(op):
        leaf = logits.clone().requires_grad_()
        outputs = op(leaf, targets, temperature=temperature)
        sum(w * out.sum() for w, out in zip(weights, outputs, strict=True) if w is not None).backward()
        return *(out.detach() for out in outputs), leaf.grad

    truth = part(lambda x, t, **kwargs: formula(x.double(), t, kept=kept, **kwargs))
    for op in (triton, reference):
        check(part(partial(op, keep_mask=kept)), truth, torch.float32)


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
def test_log_probs_without_entropy(truncated):
    logits, targets = TINY.inputs(device=DEVICE)
    kept = TINY.kept(targets) if truncated else None
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    for leaf, impl in zip(leaves, ("triton", "reference"), strict=True):
        out = logp(leaf, targets, keep_mask=kept, impl=impl)
        torch.testing.assert_close(out.detach().double(), formula(logits, targets, kept=kept)[0])
        out.sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert not logp(logits, targets, impl="triton").requires_grad


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
def test_strides_and_int32_targets(truncated):
    case = LogpCase("strided", 6, 20)
    logits, targets = case.inputs(device=DEVICE)
    pairs = torch.stack([targets, targets], 1).int()
    temperature = torch.linspace(1, 2, 12, device=DEVICE)[::2]
    kept = case.kept(targets) if truncated else None
    plain = run(triton, logits, targets, temperature=temperature, keep_mask=kept)
    if kept is not None:
        kept = KeptTokens(kept.ids.int().repeat_interleave(2)[::2], kept.offsets.repeat_interleave(2)[::2])
    wide = torch.zeros(6, 43, device=DEVICE)
    for view in (wide[:, :20], wide[:, 1:41:2], torch.zeros(20, 6, device=DEVICE).t()):
        view.copy_(logits)
        leaf = view.detach().requires_grad_()
        log_probs, entropy = triton(leaf, pairs[:, 1], temperature=temperature, keep_mask=kept)
        g, h = torch.randn(2, 6, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        ((log_probs * g).sum() + (entropy * h).sum()).backward()
        # On a GPU the strides decide which thread adds which columns.
        torch.testing.assert_close((log_probs.detach(), entropy.detach(), leaf.grad), plain)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
def test_in_place_backward_leaves_the_gradient_where_the_logits_were(impl, truncated):
    case = LogpCase("in_place", 7, 30, vocab_size=26)
    logits, targets = case.inputs(torch.bfloat16, DEVICE)
    kept = case.kept(targets) if truncated else None
    grads = []
    for in_place in (False, True):
        source = logits.clone().requires_grad_()
        own = source * 1
        own.retain_grad()
        log_probs, entropy = logp(
            own,
            targets,
            vocab_size=26,
            keep_mask=kept,
            return_entropy=True,
            inplace_backward=in_place,
            impl=impl,
        )
        assert torch.equal(own, logits)
        loss = log_probs.sum() + entropy.sum()
        loss.backward(retain_graph=True)
        grads.append(source.grad.clone())
        assert torch.equal(own.detach(), own.grad if in_place else logits)
    assert torch.equal(*grads)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_columns_of_probability_zero_and_large_logits():
    logits = torch.tensor([[0.0, -math.inf, 0.0], [1e4, 0.0, -1e4]], device=DEVICE)
    log_probs, entropy, grad = run(triton, logits, torch.tensor([0, 1], device=DEVICE))
    assert log_probs.tolist() == pytest.approx([math.log(0.5), -1e4], rel=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0], rel=1e-6)
    g = torch.randn(2, 2, generator=torch.Generator().manual_seed(3))[0].tolist()
    assert grad[0].tolist() == pytest.approx([0.5 * g[0], 0.0, -0.5 * g[0]], abs=1e-6)
    assert grad[1].tolist() == pytest.approx([-g[1], g[1], 0.0], abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_spoil_their_token_only(value):
    logits, targets = TINY.inputs(device=DEVICE)
    clean = run(triton, logits, targets)
    logits[2, 4] = value
    dirty = run(triton, logits, targets)
    others = [token for token in range(7) if token != 2]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(clean, dirty, strict=True))
    assert dirty[0][2].isnan() and dirty[1][2].isnan()


@pytest.fixture
def unread(monkeypatch):
    """Turns off all checks that read values, as on a device in auto mode."""
    for module in ("vocab", "kept"):
        monkeypatch.setattr(f"rl_kernel.{module}.reads_values", lambda tensor: False)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_unread_bad_values_give_nan_for_their_token(unread, impl):
    logits, targets = TINY.inputs(device=DEVICE)
    targets[1], targets[2], targets[3] = -1, 11, 2**40
    temperature = torch.tensor([1.0, 1, 1, 1, 0, -1, math.inf], device=DEVICE)
    leaf = logits.requires_grad_()
    log_probs = logp(leaf, targets, temperature=temperature, impl=impl)
    assert log_probs.isnan().tolist() == [False] + [True] * 6
    log_probs[:4].nan_to_num().sum().backward()
    assert leaf.grad[:4].isfinite().all()


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_unread_bad_kept_sets_stay_in_bounds(unread, impl):
    logits, _ = LogpCase("bad_kept", 4, 8).inputs(device=DEVICE)
    targets = torch.tensor([0, 1, 2, 3], device=DEVICE)
    ids = torch.tensor([0, -5, 99, 2**40, 2, 3, 5], device=DEVICE)
    # The tokens have: ids outside the vocabulary except one, a target that was not kept, and an end beyond the ids.
    kept = KeptTokens(ids, torch.tensor([0, 4, 4, 6, 9], device=DEVICE))
    log_probs = logp(logits, targets, keep_mask=kept, impl=impl)
    want = formula(logits, targets)[0]
    assert log_probs[0].item() == 0.0
    assert log_probs[1].item() == pytest.approx(want[1].item(), rel=1e-5)
    pair = torch.log_softmax(logits[2, 2:4].double(), 0)[0].item()
    assert log_probs[2].item() == pytest.approx(pair, rel=1e-5)
    assert log_probs[3].item() == -math.inf


def test_what_it_cannot_do_is_refused():
    logits, targets = TINY.inputs(torch.float64, DEVICE)
    with pytest.raises(Refused, match="logp must run its Triton implementation, but"):
        logp(logits, targets, impl="triton")


def test_same_bits_every_time():
    logits, targets = LogpCase("bits", 5, 4700).inputs(torch.bfloat16, DEVICE)
    first, second = (run(triton, logits, targets, temperature=0.9) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("width", [2, 50])
def test_tiles_of_the_vocabulary_merge_to_the_whole(width):
    """Like `linear_logp`, this computes statistics of column tiles, one merge and gradients of tiles, over up to 65
    parts."""
    case = LogpCase("tiles", 3, 130, vocab_size=127)
    logits, targets = case.inputs(device=DEVICE)
    shard = VocabShard(0, 130, 127, None, 130)
    inverse = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
    parts = []
    columns = [slice(first, min(first + width, 130)) for first in range(0, 130, width)]
    for at in columns:
        parts.append(kernels.row_stats(logits[:, at], targets, inverse, shard.tile(at), True))
    log_probs, lse, entropy = kernels.merge(torch.stack(parts))
    g, h = torch.randn(2, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    grad = torch.empty_like(logits)
    for at in columns:
        kernels.logits_grad(logits[:, at], targets, lse, entropy, shard.tile(at), g, h, inverse, grad[:, at])
    truth = run(formula, logits.double(), targets, temperature=1 / inverse, vocab_size=127)
    check((log_probs, entropy, grad), truth, torch.float32)
    z = (logits * inverse[:, None])[:, :127]
    torch.testing.assert_close(lse, torch.logsumexp(z, 1))


def test_stats_by_the_reference():
    logits, targets = LogpCase("stats", 5, 40).inputs(device=DEVICE)
    logits[3] = -math.inf  # no column is in this row, as in a shard without the token's kept ids
    for shard in (VocabShard(0, 40, None, None, 80), VocabShard(20, 40, 50, None, 80)):
        got = kernels.row_stats(logits, targets, 1.0, shard, True)
        want = reference_stats(logits[:, : shard.real], targets, shard, True)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert got[:2, 3].tolist() == [torch.finfo(torch.float32).min, 0.0]


def test_merge_into_given_tensors_and_without_entropy():
    parts = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1)).abs().to(DEVICE)
    out = tuple(torch.zeros(8, device=DEVICE)[1:7] for _ in range(3))
    assert all(a is b for a, b in zip(kernels.merge(parts, out), out, strict=True))
    log_probs, lse, entropy = kernels.merge(parts[:, :3])
    torch.testing.assert_close((log_probs, lse), out[:2])
    assert entropy is None
    torch.testing.assert_close(kernels.merge(parts.transpose(1, 2).contiguous().transpose(1, 2)), out)


def test_gradient_into_a_narrower_dtype():
    logits, targets = LogpCase("narrow", 4, 50, vocab_size=45).inputs(device=DEVICE)
    shard = VocabShard(0, 50, 45, None, 50)
    lse = torch.logsumexp(logits[:, :45], 1)
    g = torch.linspace(-1, 1, 4, device=DEVICE)
    out = torch.full((4, 50), 9.0, dtype=torch.float16, device=DEVICE)
    kernels.logits_grad(logits, targets, lse, None, shard, g, None, 1.0, out)
    want = reference_grad(logits[:, :45].clone(), targets, lse, None, shard, g, None)
    torch.testing.assert_close(out[:, :45].float(), want, rtol=2**-10, atol=1e-6)
    assert not out[:, 45:].any()


def test_logits_are_rounded_before_the_temperature():
    logits, targets = LogpCase("rounding", 4, 50).inputs(device=DEVICE)
    shard = VocabShard(0, 50, None, None, 50)
    # The dtype is float16, which the interpreter rounds as the hardware does.
    rounded = logits.half().float()
    for source, rounding in ((logits, torch.float16), (rounded, None)):
        stats = kernels.row_stats(source, targets, 0.5, shard, True, rounding)
        lse = kernels.merge(stats[None])[1]
        grad = kernels.logits_grad(
            source, targets, lse, None, shard, lse, None, 0.5, torch.empty_like(source), rounding
        )
        if rounding is not None:
            first = stats, grad
    assert torch.equal(stats, first[0]) and torch.equal(grad, first[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 20, 40])
def test_kept_tiles_of_a_shard_by_the_reference(dtype, start):
    case, rows = LogpCase("keeping", 9, 60, vocab_size=50), slice(3, 9)
    logits, targets = case.inputs(dtype, DEVICE)
    kept, targets = case.kept(targets, most=600).rows(rows), targets[rows]
    shard = VocabShard(start, 20, 50, None, 60)
    tile = logits[rows, start : start + 20]
    inverse = torch.linspace(0.5, 1.5, 6, device=DEVICE)
    z = kept_kernels.no_logits(kept, tile)
    for at in (slice(0, 7), slice(7, 20)):
        kept_kernels.pick_(z, tile[:, at], kept, inverse, shard.tile(at))
    scaled = tile[:, : shard.real].float() * inverse[:, None]
    truncated = kept.truncated
    stats = kept_kernels.kept_stats(z, kept, targets, shard)
    want = kept_stats(scaled, targets, shard, False, kept)
    torch.testing.assert_close(stats[:, truncated], want[:, truncated])
    assert not stats[1, ~truncated].any() and truncated.any() and not truncated.all()
    # Any normalisers are allowed if a row without ids has the same value for both.
    whole_lse, entropy = torch.full((2, 6), 9.0, device=DEVICE)
    lse = torch.where(truncated, 8.0, whole_lse)
    for g, h in ((inverse, entropy), (inverse, None), (None, inverse)):
        out = torch.full((6, 20), 7.0, device=DEVICE)
        kept_kernels.kept_logits_grad(
            tile, z, kept, targets, lse, whole_lse, entropy, shard, g, h, inverse, out
        )
        grad = kept_grad(scaled, targets, lse, whole_lse, entropy, shard, kept, g, h) * inverse[:, None]
        torch.testing.assert_close(out[:, : shard.real], grad, rtol=1e-5, atol=1e-6)
        assert not out[:, shard.real :].any()
