"""Compares `linear_logp` with hand-worked numbers, the float64 formula and derivatives, and checks its memory bound."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernel import linear_logp
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.cases import (
    CASES,
    LinearCase,
    acceptance_violations,
    compute_truth,
    contract_violations,
    evaluate,
    formula,
    plain,
    upstream,
)
from rl_kernel.ops.linear_logp.reference import KEPT_ELEMENTS
from rl_kernel.vocab import TILE_ELEMENTS, TILE_MIN_ROWS

SMALL = LinearCase("small", 6, 3, 5)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def ours(*args, **kwargs):
    return linear_logp(*args, return_entropy=True, impl="reference", **kwargs)


def inputs_of(case, dtype, seed=0):
    hidden, weight, targets = case.inputs(dtype, seed=seed)
    return {"hidden": hidden, "weight": weight}, targets


def test_log_prob_entropy_and_gradients_by_hand():
    # Logits (0, ln 3): p = (1/4, 3/4).
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    log_probs, entropy = ours(hidden, weight, torch.tensor([1]))
    assert log_probs.item() == pytest.approx(math.log(0.75), rel=1e-6)
    want = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert entropy.item() == pytest.approx(want, rel=1e-6)
    log_probs.sum().backward(retain_graph=True)
    # d log p[1] / d logits = (-1/4, 1/4)
    assert weight.grad[:, 0].tolist() == pytest.approx([-0.25, 0.25], rel=1e-6)
    assert hidden.grad.item() == pytest.approx(0.25 * math.log(3), rel=1e-6)
    weight.grad = hidden.grad = None
    entropy.sum().backward()
    # d H / d logits = -p (log p + H)
    slope = [-0.25 * (math.log(0.25) + want), -0.75 * (math.log(0.75) + want)]
    assert weight.grad[:, 0].tolist() == pytest.approx(slope, rel=1e-5)
    assert hidden.grad.item() == pytest.approx(slope[1] * math.log(3), rel=1e-5)


def test_temperature_divides_the_logits():
    # Logits doubled: p = (1/10, 9/10); logits halved: p = (1, sqrt 3) / (1 + sqrt 3).
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    out = linear_logp(hidden, weight, torch.tensor([1, 0]), temperature=torch.tensor([0.5, 2.0]))
    assert out.tolist() == pytest.approx([math.log(0.9), -math.log(1 + math.sqrt(3))], rel=1e-6)
    assert linear_logp(hidden, weight, torch.tensor([1, 1]), temperature=0.5).tolist() == pytest.approx(
        [math.log(0.9)] * 2, rel=1e-6
    )


def test_bias_and_padding_by_hand():
    # Logits (0, ln 3, 50) with the last column padding: as above.
    bias = torch.tensor([0.0, math.log(3), 50.0], requires_grad=True)
    weight = torch.zeros(3, 2, requires_grad=True)
    hidden = torch.ones(1, 2)
    out = linear_logp(hidden, weight, torch.tensor([1]), bias=bias, vocab_size=2)
    assert out.item() == pytest.approx(math.log(0.75), rel=1e-6)
    out.sum().backward()
    assert bias.grad.tolist() == pytest.approx([-0.25, 0.25, 0.0], rel=1e-6)
    assert weight.grad.tolist() == [pytest.approx([g, g], rel=1e-6) for g in (-0.25, 0.25, 0.0)]


def test_bfloat16_logits_are_rounded_before_the_temperature():
    # 1 + 2**-9 rounds to 1 in bfloat16: both columns get the same logit, whatever the temperature.
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [1 + 2**-9]])
    rounded = linear_logp(hidden, weight, torch.tensor([0]), logits_dtype="bfloat16", temperature=0.01)
    exact = linear_logp(hidden, weight, torch.tensor([0]), temperature=0.01)
    assert rounded.item() == pytest.approx(math.log(0.5), rel=1e-6)
    assert exact.item() == pytest.approx(-math.log(1 + math.exp(2**-9 / 0.01)), rel=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("logits_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_case_keeps_the_contract(case, dtype, logits_dtype):
    layer, targets = inputs_of(case, dtype)
    temperature = torch.linspace(0.5, 1.5, case.tokens)
    kwargs = {"temperature": temperature, "vocab_size": case.vocab_size}
    actual = evaluate(ours, layer, targets, logits_dtype=logits_dtype, **kwargs)
    truth = compute_truth(layer, targets, **kwargs)
    assert {name: out.dtype for name, out in actual.items()} == {
        "log_probs": torch.float32,
        "entropy": torch.float32,
        "d_hidden": dtype,
        "d_weight": dtype,
    }
    rounding = {None: dtype, "float32": torch.float32, "bfloat16": torch.bfloat16}[logits_dtype]
    assert not contract_violations(actual, truth, dtype, rounding)
    if logits_dtype == "float32":
        # The reference computes in float32 and rounds once at the end.
        once = CONTRACTS["logp"].gradients[str(dtype).removeprefix("torch.")]
        for name in ("d_hidden", "d_weight"):
            assert max_error(actual[name], truth[name]) <= once.bound(truth[name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_worse_than_plain_pytorch_in_the_same_dtype(case, dtype, uses):
    samples = []
    for seed in range(3 if case.tokens < 100 and case.vocab < 1000 else 1):
        layer, targets = inputs_of(case, dtype, seed)
        options = {"uses": uses, "vocab_size": case.vocab_size}
        results = [evaluate(op, layer, targets, **options) for op in (ours, plain)]
        samples.append((*results, compute_truth(layer, targets, **options)))
    assert not acceptance_violations(samples, dtype)


def test_the_violations_are_found():
    layer, targets = inputs_of(SMALL, torch.bfloat16)
    truth = compute_truth(layer, targets)
    good = evaluate(plain, layer, targets)
    for name, out in good.items():
        bad = good | {name: out + 0.1 * out.abs().max()}
        for found in (
            contract_violations(bad, truth, torch.bfloat16, torch.bfloat16),
            acceptance_violations([(bad, good, truth)], torch.bfloat16),
        ):
            assert [text.split()[0] for text in found] == [name]
    bad = good | {"d_weight": good["d_weight"] * math.nan}
    assert contract_violations(bad, truth, torch.bfloat16, None)[0].startswith("log_probs is off")
    assert contract_violations(bad, truth, torch.bfloat16, torch.bfloat16)[0].startswith("d_weight is off")
    assert acceptance_violations([(bad, good, truth)], torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_rounded_as_the_engine_rounds_them(dtype):
    """By default logits are rounded to the dtype of the weight, with the bits of a product in that dtype."""
    layer, targets = inputs_of(LinearCase("rounding", 20, 16, 50), dtype)
    logits = (layer["hidden"].float() @ layer["weight"].float().t()).to(dtype).float()
    want = (torch.log_softmax(logits / 0.7, -1)).gather(1, targets[:, None])[:, 0]
    got = linear_logp(**layer, targets=targets, temperature=0.7, impl="reference")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("vocab_size", [None, 4])
def test_gradcheck(return_entropy, per_token, vocab_size):
    hidden, weight, targets = SMALL.inputs(torch.float64)
    bias = torch.linspace(-1, 1, 5, dtype=torch.float64)
    temperature = torch.linspace(0.6, 1.4, 6, dtype=torch.float64) if per_token else 0.8
    kwargs = {"temperature": temperature, "vocab_size": vocab_size, "return_entropy": return_entropy}
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]

    def op(hidden, weight, bias):
        return linear_logp(hidden, weight, targets % 4, bias=bias, **kwargs)

    assert torch.autograd.gradcheck(op, inputs)


def test_gradcheck_of_recomputed_tiles(monkeypatch):
    monkeypatch.setattr("rl_kernel.ops.linear_logp.reference.KEPT_ELEMENTS", 0)
    monkeypatch.setattr("rl_kernel.vocab.TILE_ELEMENTS", 10)
    monkeypatch.setattr("rl_kernel.vocab.TILE_MIN_ROWS", 1)
    hidden, weight, targets = SMALL.inputs(torch.float64)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(lambda h, w: ours(h, w, targets, temperature=0.7), inputs)


def test_weight_tied_to_the_embedding_that_made_the_hidden_states():
    _, weight, targets = SMALL.inputs(torch.float64)
    ids = torch.tensor([0, 1, 2, 3, 4, 0])

    def loss(op, weight):
        weight = weight.clone().requires_grad_()
        log_probs, entropy = op(torch.tanh(weight[ids]), weight, targets)
        (log_probs.sum() + entropy.sum()).backward()
        return weight.grad

    torch.testing.assert_close(loss(ours, weight), loss(formula, weight))


def test_strided_inputs_and_int32_targets():
    case = LinearCase("strided", 9, 6, 14)
    hidden, weight, targets = case.inputs()
    wide = torch.zeros(9, 12)
    wide[:, ::2] = hidden
    pairs = torch.stack([targets, targets], 1)
    temperature = torch.linspace(1, 2, 18)[::2]
    dense = evaluate(ours, {"hidden": hidden, "weight": weight}, targets, temperature=temperature)
    leaves = [wide.requires_grad_(), weight.t().contiguous().requires_grad_()]
    log_probs, entropy = ours(leaves[0][:, ::2], leaves[1].t(), pairs[:, 1].int(), temperature=temperature)
    g, h = upstream(9)
    (log_probs * g + entropy * h).sum().backward()
    strided = (log_probs.detach(), entropy.detach(), leaves[0].grad[:, ::2], leaves[1].grad.t())
    torch.testing.assert_close(strided, tuple(dense.values()))


def test_only_what_is_needed_gets_a_gradient():
    hidden, weight, targets = SMALL.inputs()
    frozen = hidden.clone().requires_grad_()
    linear_logp(frozen, weight, targets).sum().backward()
    trained = weight.clone().requires_grad_()
    linear_logp(hidden, trained, targets).sum().backward()
    assert (
        frozen.grad is not None and trained.grad is not None and weight.grad is None and hidden.grad is None
    )
    assert not linear_logp(hidden, weight, targets).requires_grad
    with torch.no_grad():
        assert not linear_logp(frozen, trained, targets).requires_grad


def test_entropy_as_a_metric_changes_no_gradient():
    hidden, weight, targets = SMALL.inputs()
    grads = []
    for with_entropy in (False, True):
        leaf = weight.clone().requires_grad_()
        out = linear_logp(hidden, leaf, targets, return_entropy=with_entropy)
        (out[0] if with_entropy else out).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_entropy_alone_has_a_gradient():
    hidden, weight, targets = SMALL.inputs(torch.float64)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(lambda h, w: ours(h, w, targets)[1], inputs)


def test_no_tokens_keep_the_graph_alive():
    hidden = torch.zeros(0, 3, requires_grad=True)
    weight = torch.ones(5, 3, requires_grad=True)
    log_probs, entropy = ours(hidden, weight, torch.zeros(0, dtype=torch.int64), temperature=torch.ones(0))
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 3)
    assert torch.equal(weight.grad, torch.zeros(5, 3))


def test_large_logits_stay_finite():
    hidden = torch.full((1, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    log_probs, entropy = ours(hidden, weight, torch.tensor([1]))
    assert log_probs.item() == -1e4 and entropy.item() == 0.0
    (log_probs + entropy).sum().backward()
    assert hidden.grad.item() == -1.0


@pytest.mark.parametrize("case", [c for c in CASES if c.tokens > 1], ids=lambda case: case.name)
def test_same_bits_every_time(case):
    layer, targets = inputs_of(case, torch.bfloat16)
    first, second = (evaluate(ours, layer, targets, vocab_size=case.vocab_size) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_times_vocabulary_is_never_allocated(dtype):
    case = LinearCase("wide", 2048, 16, 8192)
    hidden, weight, targets = case.inputs(dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with LargestTensor() as seen:
        log_probs, entropy = ours(*leaves, targets, temperature=0.9)
        (log_probs.sum() + entropy.sum()).backward()
    tile = max(TILE_ELEMENTS, TILE_MIN_ROWS * case.vocab)
    assert case.tokens * case.vocab > KEPT_ELEMENTS >= tile
    assert seen.largest <= max(tile, hidden.numel(), weight.numel()) == case.tokens * case.vocab // 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3)}, r"hidden must have shape \[N, H\], got \[3\]"),
        ({"hidden": [1.0]}, "hidden must be a tensor, got list; convert it with torch.as_tensor"),
        ({"hidden": torch.zeros(6, 3, dtype=torch.int64)}, "hidden must be one of float32, .* got int64"),
        ({"weight": torch.zeros(5, 4)}, r"weight must have shape \[V_local, 3\], got \[5, 4\]"),
        (
            {"weight": torch.zeros(0, 3)},
            "weight must hold at least one vocabulary column, got an empty shard",
        ),
        ({"weight": torch.zeros(5, 3, device="meta")}, "weight must be on cpu, got meta"),
        ({"bias": torch.zeros(4)}, r"bias must have shape \[5\], got \[4\]"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, r"targets must have shape \[6\], got \[4\]"),
        ({"targets": torch.zeros(6)}, "targets must be one of int64, int32, got float32"),
        (
            {"targets": torch.full((6,), 5)},
            r"targets must lie in \[0, 5\), got values from 5 to 5; check that",
        ),
        ({"targets": torch.full((6,), 4), "vocab_size": 4}, r"targets must lie in \[0, 4\)"),
        ({"targets": torch.full((6,), -1)}, r"targets must lie in \[0, 5\), got values from -1 to -1"),
        ({"temperature": 0.0}, "temperature must be finite and be > 0, got 0.0"),
        ({"temperature": math.nan}, "temperature must be finite and be > 0, got nan"),
        ({"temperature": torch.ones(5)}, r"temperature must have shape \[6\], got \[5\]"),
        ({"temperature": torch.tensor([1.0, 1, 1, -2, 1, 1])}, "temperature must .* got -2.0 for token 3"),
        ({"temperature": torch.ones(6, requires_grad=True)}, "temperature must not require grad"),
        ({"vocab_start": 2}, "vocab_start must be >= 0, and 0 without a tp_group, got 2"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
        ({"vocab_size": 6}, "vocab_size must be <= 5, the columns of all shards, got 6"),
        ({"logits_dtype": "fp8"}, "logits_dtype must be 'float32', 'bfloat16' or None, got 'fp8'; take the"),
        ({"workspace_bytes": 0}, "workspace_bytes must be > 0, got 0; leave it out for 1.5 GiB"),
        ({"keep_mask": torch.ones(6, 5)}, "keep_mask must be a KeptTokens, got Tensor"),
        ({"keep_mask": KeptTokens.from_lists([[1]] * 6)}, "keep_mask.ids must hold each truncated token's"),
        ({"impl": "cuda"}, "impl must be one of reference, triton, got 'cuda'"),
    ],
)
def test_bad_input_is_named(change, message):
    inputs = {"hidden": torch.zeros(6, 3), "weight": torch.zeros(5, 3), "targets": torch.zeros(6).long()}
    inputs |= change
    with pytest.raises(ValueError, match=message):
        linear_logp(inputs.pop("hidden"), inputs.pop("weight"), inputs.pop("targets"), **inputs)
