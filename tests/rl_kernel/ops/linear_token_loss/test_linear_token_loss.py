"""Tests the contract of `linear_token_loss` for both implementations, and the reference in float64."""

from functools import partial

import pytest
import torch
from hardware_rounding import nearest  # noqa: F401

from rl_kernel import grpo_loss, linear_logp, linear_token_loss
from rl_kernel.dispatch import interpreted
from rl_kernel.mode import using
from rl_kernel.ops.linear_logp.cases import LinearCase, contract_violations, formula, upstream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SMALL = LinearCase("small", 6, 8, 11)
IMPLS = ["reference", "triton"] if interpreted() or DEVICE == "cuda" else ["reference"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
both_impls = pytest.mark.parametrize("impl", IMPLS)


def weighted(tokens, entropy=True):
    """Returns (g * log_probs + h * entropy).sum(), with two metrics."""
    g, h = upstream(tokens, DEVICE)

    def token_loss(log_probs, entropies, rows):
        loss = (log_probs * g[rows]).sum()
        if entropy:
            loss = loss + (entropies * h[rows]).sum()
        return loss, {"probs": log_probs.exp(), "row": torch.arange(rows.start, rows.stop, device=DEVICE)}

    return token_loss


def leaves_of(case, dtype=FP32, bias=False):
    hidden, weight, targets = case.inputs(dtype, DEVICE)
    layer = {"hidden": hidden, "weight": weight}
    if bias:
        layer["bias"] = torch.linspace(-1, 1, case.vocab, device=DEVICE).to(dtype)
    return {name: tensor.requires_grad_() for name, tensor in layer.items()}, targets


def expected(leaves, targets, token_loss, entropy=True, **options):
    """Returns loss and gradients from `linear_logp`'s formula in float64 and autograd."""
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    log_probs, entropies = formula(**wide, targets=targets, **options)
    loss, _ = token_loss(log_probs, entropies if entropy else None, slice(0, len(targets)))
    loss.backward()
    return {"log_probs": log_probs.detach(), "entropy": entropies.detach(), "loss": loss.detach()} | {
        f"d_{name}": x.grad for name, x in wide.items()
    }


@both_impls
@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_loss_outputs_metrics_and_gradients(impl, scale):
    leaves, targets = leaves_of(SMALL, bias=True)
    options = {"temperature": torch.linspace(0.5, 1.5, 6, device=DEVICE), "vocab_size": 11}
    loss = weighted(6)
    result = linear_token_loss(
        **leaves, targets=targets, token_loss=loss, return_entropy=True, impl=impl, **options
    )
    (scale * result.loss).backward()
    truth = expected(leaves, targets, loss, **options)
    assert result.loss.shape == () and result.loss.dtype == FP32
    assert result.loss.item() == pytest.approx(truth.pop("loss").item(), rel=1e-5)
    actual = {"log_probs": result.log_probs, "entropy": result.entropy}
    actual |= {f"d_{name}": leaf.grad / scale for name, leaf in leaves.items()}
    assert not contract_violations(actual, truth, FP32, FP32)
    assert result.metrics.keys() == {"probs", "row"}
    torch.testing.assert_close(result.metrics["probs"], result.log_probs.exp())
    assert result.metrics["row"].tolist() == list(range(6))
    detached = result.log_probs, result.entropy, *result.metrics.values()
    assert not any(x.requires_grad for x in detached)


@both_impls
def test_entropy_is_none_unless_asked_for(impl):
    leaves, targets = leaves_of(SMALL)
    seen = []

    def token_loss(log_probs, entropy, rows):
        seen.append((entropy, rows))
        return log_probs.sum(), {}

    result = linear_token_loss(**leaves, targets=targets, token_loss=token_loss, impl=impl)
    assert result.entropy is None and result.metrics == {}
    assert seen == [(None, slice(0, 6))]


@both_impls
@pytest.mark.parametrize("tokens", [0, 1])
def test_zero_and_one_token(impl, tokens):
    leaves, targets = leaves_of(LinearCase("few", tokens, 8, 11), bias=True)
    loss = weighted(tokens)
    result = linear_token_loss(**leaves, targets=targets, token_loss=loss, return_entropy=True, impl=impl)
    result.loss.backward()
    truth = expected(leaves, targets, loss)
    actual = {"log_probs": result.log_probs, "entropy": result.entropy, "loss": result.loss.detach()}
    actual |= {f"d_{name}": leaf.grad for name, leaf in leaves.items()}
    assert not contract_violations(actual, truth, FP32, FP32)
    assert result.metrics["probs"].shape == result.log_probs.shape == (tokens,)


@both_impls
def test_a_loss_of_the_entropy_only_and_of_nothing(impl):
    _, h = upstream(6, DEVICE)
    for loss in (
        lambda _, e, rows: ((e * h[rows]).sum(), {}),
        lambda *_: (torch.zeros((), device=DEVICE), {}),
    ):
        leaves, targets = leaves_of(SMALL)
        run = partial(linear_token_loss, targets=targets, token_loss=loss, return_entropy=True, impl=impl)
        run(**leaves).loss.backward()
        wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        truth = loss(*formula(**wide, targets=targets), slice(0, 6))[0]
        if truth.requires_grad:
            truth.backward()
        for name, leaf in leaves.items():
            want = torch.zeros_like(wide[name]) if wide[name].grad is None else wide[name].grad
            torch.testing.assert_close(leaf.grad.double(), want, rtol=2e-5, atol=1e-6)


@both_impls
def test_only_what_is_needed_gets_a_gradient(impl):
    loss = weighted(6)
    both, targets = leaves_of(SMALL)
    linear_token_loss(
        **both, targets=targets, token_loss=loss, return_entropy=True, impl=impl
    ).loss.backward()
    for frozen in both:
        leaves, _ = leaves_of(SMALL)
        leaves[frozen].requires_grad_(False)
        buffer = torch.ones_like(leaves["weight"]) if frozen == "weight" else None
        result = linear_token_loss(
            **leaves, targets=targets, token_loss=loss, return_entropy=True, weight_grad=buffer, impl=impl
        )
        result.loss.backward()
        for name, leaf in leaves.items():
            assert leaf.grad is None if name == frozen else torch.equal(leaf.grad, both[name].grad)
        assert buffer is None or buffer.eq(1).all()


@both_impls
@pytest.mark.parametrize("how", ["no_grad", "frozen"])
def test_without_gradients_nothing_is_computed_for_them(impl, how):
    leaves, targets = leaves_of(SMALL)
    buffer = torch.ones(11, 8, device=DEVICE)
    modes = []

    def token_loss(log_probs, entropy, rows):
        modes.append(log_probs.requires_grad)
        return log_probs.sum(), {"twice": 2 * log_probs}

    if how == "frozen":
        leaves = {name: leaf.detach() for name, leaf in leaves.items()}
    with torch.set_grad_enabled(how == "frozen"):
        result = linear_token_loss(
            **leaves, targets=targets, token_loss=token_loss, weight_grad=buffer, impl=impl
        )
    assert modes == [False] and not result.loss.requires_grad
    assert buffer.eq(1).all()
    want = linear_logp(**{name: x.detach() for name, x in leaves.items()}, targets=targets)
    torch.testing.assert_close(result.log_probs, want)
    torch.testing.assert_close(result.metrics["twice"], 2 * want)


@both_impls
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_weight_gradient_is_added_to_a_buffer_in_the_call(impl, dtype):
    """Two micro-batches add their gradients in float32, whatever the dtype; autograd gets no gradient at any time."""
    cases = [LinearCase("first", 6, 8, 11), LinearCase("second", 3, 8, 11)]
    buffer = torch.full((11, 8), 0.5, device=DEVICE)
    weight = cases[0].inputs(dtype, DEVICE)[1].requires_grad_()
    truth = buffer.double()
    for case in cases:
        leaves, targets = leaves_of(case, dtype)
        leaves["weight"] = weight
        loss = weighted(case.tokens)
        result = linear_token_loss(
            **leaves, targets=targets, token_loss=loss, return_entropy=True, weight_grad=buffer, impl=impl
        )
        want = expected(leaves, targets, loss)
        truth += want["d_weight"]
        bound = {FP32: 2e-5, BF16: 2**-5}[dtype] * truth.abs().max()
        assert (buffer - truth).abs().max() <= bound
        before = buffer.clone()
        (3 * result.loss).backward()
        assert torch.equal(buffer, before) and weight.grad is None
        actual, truth_of_hidden = {"d_hidden": leaves["hidden"].grad / 3}, {"d_hidden": want["d_hidden"]}
        assert not contract_violations(actual, truth_of_hidden, dtype, dtype)


@both_impls
def test_one_backward_for_each_call(impl):
    leaves, targets = leaves_of(SMALL)
    result = linear_token_loss(
        **leaves, targets=targets, token_loss=weighted(6), return_entropy=True, impl=impl
    )
    first = torch.autograd.grad(2 * result.loss, list(leaves.values()), retain_graph=True)
    kept = [grad.clone() for grad in first]
    with pytest.raises(RuntimeError, match="linear_token_loss must be called again for a second backward"):
        torch.autograd.grad(2 * result.loss, list(leaves.values()), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


@both_impls
def test_weight_tied_to_the_embedding_that_made_the_hidden_states(impl):
    _, weight, targets = SMALL.inputs(FP32, DEVICE)
    ids = torch.tensor([0, 1, 2, 3, 4, 0], device=DEVICE)
    loss = weighted(6)
    tied, wide = weight.clone().requires_grad_(), weight.double().requires_grad_()
    call = {"targets": targets, "token_loss": loss, "return_entropy": True, "impl": impl}
    linear_token_loss(torch.tanh(tied[ids]), tied, **call).loss.backward()
    loss(*formula(torch.tanh(wide[ids]), wide, targets), slice(0, 6))[0].backward()
    torch.testing.assert_close(tied.grad.double(), wide.grad, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_gradcheck_of_the_reference(return_entropy, per_token):
    case = LinearCase("gradcheck", 6, 3, 5, vocab_size=4)
    hidden, weight, targets = case.inputs(FP64)
    temperature = torch.linspace(0.6, 1.4, 6, dtype=FP64) if per_token else 0.8
    bias = torch.linspace(-1, 1, 5, dtype=FP64)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]

    def token_loss(log_probs, entropy, rows):
        return log_probs.square().sum() + (entropy.square().sum() if return_entropy else 0), {}

    def op(hidden, weight, bias):
        return linear_token_loss(
            hidden, weight, targets, token_loss, bias=bias, temperature=temperature, vocab_size=4,
            return_entropy=return_entropy,
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(op, inputs)


def test_the_mode_decides():
    leaves, targets = leaves_of(SMALL)
    call = {"targets": targets, "token_loss": weighted(6), "return_entropy": True}
    reference = linear_token_loss(**leaves, **call, impl="reference")
    with using("off"):
        assert torch.equal(linear_token_loss(**leaves, **call).loss, reference.loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3)}, r"hidden must have shape \[N, H\], got \[3\]"),
        ({"weight": torch.zeros(5, 4)}, r"weight must have shape \[V_local, 3\], got \[5, 4\]"),
        ({"targets": torch.full((6,), 5)}, r"targets must lie in \[0, 5\), got values from 5 to 5"),
        ({"temperature": -1.0}, "temperature must be finite and be > 0, got -1.0"),
        ({"logits_dtype": "fp8"}, "logits_dtype must be 'float32', 'bfloat16' or None, got 'fp8'"),
        ({"workspace_bytes": -5}, "workspace_bytes must be > 0, got -5"),
        ({"weight_grad": torch.zeros(5, 4)}, r"weight_grad must have shape \[5, 3\], got \[5, 4\]"),
        ({"weight_grad": torch.zeros(5, 3).bfloat16()}, "weight_grad must be one of float32, got bfloat16"),
        ({"weight_grad": torch.zeros(5, 3, device="meta")}, "weight_grad must be on cpu, got meta"),
        ({"vocab_size": 9}, "vocab_size must be <= 5, the columns of all shards, got 9"),
        ({"impl": "fast"}, "impl must be one of reference, triton, got 'fast'"),
    ],
)
def test_bad_input_is_named(change, message):
    inputs = {"hidden": torch.zeros(6, 3), "weight": torch.zeros(5, 3), "targets": torch.zeros(6).long()}
    with pytest.raises(ValueError, match=message):
        linear_token_loss(**(inputs | change), token_loss=lambda log_probs, *_: (log_probs.sum(), {}))


def test_an_error_in_the_loss_reaches_the_caller():
    leaves, targets = leaves_of(SMALL)
    for impl in IMPLS:
        with pytest.raises(ValueError, match="advantages must have shape"):
            linear_token_loss(
                **leaves,
                targets=targets,
                token_loss=lambda lp, *_: grpo_loss(lp, lp.detach(), lp.detach()[1:], lp != 9, 1.0),
                impl=impl,
            )
