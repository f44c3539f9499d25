"""Tests `linear_logp` over the kernels (in Triton's interpreter without a GPU): both heads, every gradient, every use
of the workspace, compared with the float64 formula and with plain PyTorch in the same dtype."""

from functools import cache, partial

import pytest
import torch

from rl_kernel import linear_logp
from rl_kernel.dispatch import interpreted
from rl_kernel.mode import using
from rl_kernel.ops.linear_logp import cases
from rl_kernel.ops.linear_logp.cases import (
    TINY,
    LinearCase,
    compute_truth,
    contract_violations,
    evaluate,
    formula,
    upstream,
)

pytest.importorskip("triton", reason="Triton is not installed")
from hardware_rounding import nearest  # noqa: F401

from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.ops.linear_logp.autograd import make_head, prepared
from rl_kernel.ops.linear_logp.exp_head import ExpHead, refusal
from rl_kernel.ops.linear_logp.head import HeadProblem
from rl_kernel.ops.linear_logp.plain_head import PlainHead
from rl_kernel.ops.linear_logp.plan import plan
from rl_kernel.vocab import VocabShard

pytestmark = [
    # Lanes without a row or column compute with uninitialised memory.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = interpreted() or torch.cuda.get_device_capability()[0] == 9
"""True if bfloat16 layers get the exponential head on this device."""
KINDS = {
    # Dtype, logits_dtype, dtype to which logits are rounded.
    "bf16": (BF16, None, BF16),
    "bf16 exact": (BF16, "float32", FP32),
    "fp16": (FP16, None, FP16),
    "fp32": (FP32, None, FP32),
    "fp32 rounded": (FP32, "bfloat16", BF16),
}
SEEDS = {"one_token": 6, "blocks": 1}
"""Number of seeds per case: a few values are too few to judge their rounding."""
fast = partial(linear_logp, impl="triton", return_entropy=True)


def layer_of(case, dtype, seed=0, bias=False):
    hidden, weight, targets = case.inputs(dtype, DEVICE, seed)
    layer = {"hidden": hidden, "weight": weight}
    if bias:
        layer["bias"] = torch.linspace(-1, 1, case.vocab, device=DEVICE).to(dtype)
    return layer, targets


def problem_of(layer, targets, rounding=BF16, temperature=1.0):
    stored = len(layer["weight"])
    shard = VocabShard(0, stored, None, None, stored)
    bias = layer.get("bias")
    task = Task(targets, temperature, None, shard, rounding)
    return prepared(HeadProblem(layer["hidden"], layer["weight"], bias, task))


def workspace_for(layer, targets, columns, rounding=BF16):
    """Returns the bytes of a workspace for `columns` columns, and the plan that follows."""
    costs = make_head(problem_of(layer, targets, rounding)).costs(True)
    size = len(targets) * (costs.row + columns * costs.element)
    return size, plan(len(targets), len(layer["weight"]), costs, size)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_case_keeps_contract_and_acceptance_rule(case, kind, bias):
    dtype, logits_dtype, rounding = KINDS[kind]
    # For the other kinds, the tests of `logp` cover each gradient alone over the same kernels. Blocks take the
    # interpreter seconds.
    for used in (
        ("both",) if bias or dtype != BF16 or case.name == "blocks" else ("log_probs", "entropy", "both")
    ):
        samples = []
        for seed in range(SEEDS.get(case.name, 2)):
            layer, targets = layer_of(case, dtype, seed, bias)
            temperature = torch.linspace(0.5, 1.5, case.tokens, device=DEVICE)
            options = {"temperature": temperature, "vocab_size": case.vocab_size}
            actual = evaluate(fast, layer, targets, used, logits_dtype=logits_dtype, **options)
            same = evaluate(cases.plain, layer, targets, used, **options)
            truth = compute_truth(layer, targets, used, **options)
            assert not contract_violations(actual, truth, dtype, rounding)
            assert {name: out.dtype for name, out in actual.items() if name[:2] == "d_"} == {
                f"d_{name}": dtype for name in layer
            }
            samples.append((actual, same, truth))
        if kind != "fp32 rounded":  # plain PyTorch rounds to the dtype of the weight
            assert not cases.acceptance_violations(samples, dtype)


def unaligned(tensor):
    """Returns the same rows, each one element further than a multiple of 16 bytes."""
    wide = tensor.new_zeros(len(tensor), tensor.shape[1] + 8)
    wide[:, 1 : 1 + tensor.shape[1]] = tensor
    return wide[:, 1 : 1 + tensor.shape[1]]


def test_which_head_serves_what():
    case = LinearCase("heads", 7, 24, 100)
    layer, targets = layer_of(case, BF16)
    assert not HOPPER or isinstance(make_head(problem_of(layer, targets)), ExpHead)
    assert not HOPPER or refusal(problem_of(layer, targets, None)) is None
    reasons = {
        "it is for bfloat16": problem_of(layer_of(case, FP16)[0], targets, FP16),
        "it rounds logits to bfloat16 or not at all": problem_of(layer, targets, FP16),
        "it takes neither a bias nor kept tokens nor ids": problem_of(
            layer_of(case, BF16, bias=True)[0], targets
        ),
        "rows must be contiguous and start at multiples of 16 bytes": problem_of(
            layer | {"hidden": unaligned(layer["hidden"])}, targets
        ),
    }
    for reason, problem in reasons.items():
        assert refusal(problem) == reason
        assert isinstance(make_head(problem), PlainHead)


@cache
def dense():
    """Returns a layer, its targets, and the results of contiguous inputs."""
    layer, targets = layer_of(LinearCase("strided", 9, 16, 150), BF16)
    return layer, targets, evaluate(fast, layer, targets)


ALONE = [pytest.param(which, marks=pytest.mark.slow) for which in ("hidden", "weight")]


@pytest.mark.parametrize("which", [*ALONE, "both"])
@pytest.mark.parametrize("layout", ["rows", "columns", "turned", "unaligned"])
def test_strided_inputs(layout, which):
    layer, targets, wanted = dense()

    def stride(tensor):
        rows, width = tensor.shape
        views = {
            "rows": lambda: tensor.new_zeros(2 * rows, width)[::2],
            "columns": lambda: tensor.new_zeros(rows, 2 * width)[:, ::2],
            "turned": lambda: tensor.new_zeros(width, rows).t(),
            "unaligned": lambda: unaligned(tensor),
        }
        view = views[layout]()
        view.copy_(tensor)
        assert not view.is_contiguous()
        return view

    views = {name: stride(x) if which in (name, "both") else x for name, x in layer.items()}
    truth = compute_truth(layer, targets)
    strided = evaluate(fast, views, torch.stack([targets, targets], 1)[:, 1].int())
    assert not contract_violations(strided, truth, BF16, BF16)
    if layout != "unaligned":  # an unaligned layer goes to the other head
        assert all(torch.equal(strided[name], wanted[name]) for name in wanted)


def test_an_expanded_hidden_state():
    """Every token has the same row, with a stride of 0."""
    layer, targets = layer_of(LinearCase("expanded", 6, 16, 40), BF16)
    row = layer["hidden"][:1]
    truth = compute_truth(layer | {"hidden": row.repeat(6, 1)}, targets)
    actual = evaluate(fast, layer | {"hidden": row.expand(6, 16)}, targets)
    assert not contract_violations(actual, truth, BF16, BF16)


@pytest.mark.parametrize("hidden", [8, 4104])
def test_narrow_and_wide_hidden_states(hidden):
    layer, targets = layer_of(LinearCase("width", 3, hidden, 20), BF16)
    for uses in ("log_probs", "entropy"):
        truth = compute_truth(layer, targets, uses)
        assert not contract_violations(evaluate(fast, layer, targets, uses), truth, BF16, BF16)


@pytest.mark.parametrize("temperature", [1, 2, 0.7, BF16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_temperatures(dtype, temperature):
    """A temperature is a number, whole or not, or a tensor of any float dtype and any stride."""
    layer, targets = layer_of(LinearCase("temperature", 6, 16, 40), dtype)
    if isinstance(temperature, torch.dtype):
        temperature = torch.linspace(0.5, 2, 12, device=DEVICE).to(temperature)[::2]
    truth = compute_truth(layer, targets, temperature=temperature)
    actual = evaluate(fast, layer, targets, temperature=temperature)
    assert not contract_violations(actual, truth, dtype, dtype)


WIDE = {
    # Dtype, columns of the vocabulary, columns that fit, columns kept.
    "exp head": (BF16, 1500, 1300, 1280),
    "plain head": (FP32, 2600, 2570, 1536),
}


@pytest.mark.parametrize("uses", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("head", WIDE)
def test_tiles_that_do_not_fit_are_computed_again(head, uses):
    """The workspace keeps all tiles, some, or no tile in a second backward, because the first backward
    consumed them."""
    dtype, columns, fits, kept = WIDE[head]
    case = LinearCase("tiles", 5, 16, columns, vocab_size=columns - 10)
    layer, targets = layer_of(case, dtype)
    # Each tile has a target.
    targets[:3] = torch.tensor([0, kept, columns - 11])
    options = {"temperature": 0.8, "vocab_size": case.vocab_size}
    truth = compute_truth(layer, targets, uses, **options)
    whole = evaluate(fast, layer, targets, uses, **options)
    size, budget = workspace_for(layer, targets, fits, None if dtype == FP32 else dtype)
    assert budget.kept == kept
    part = evaluate(fast, layer, targets, uses, workspace_bytes=size, **options)
    for results in (whole, part):
        assert not contract_violations(results, truth, dtype, dtype)
    for name in ("d_weight", "entropy", "log_probs"):
        torch.testing.assert_close(part[name], whole[name], rtol=2**-7, atol=1e-5)
    with pytest.raises(ValueError, match="workspace_bytes must be >= .* give 5 tokens at least 1 MiB"):
        evaluate(fast, layer, targets, workspace_bytes=size // 3)


@pytest.mark.parametrize("fits", [None, "some"])
@pytest.mark.parametrize("head", WIDE)
def test_a_second_backward_gives_the_same_gradients(head, fits, monkeypatch):
    dtype, columns, some, _ = WIDE[head]
    layer, targets = layer_of(LinearCase("twice", 5, 16, columns), dtype)
    size, budget = workspace_for(layer, targets, some if fits else columns, None if dtype == FP32 else dtype)
    kind = type(make_head(problem_of(layer, targets)))
    memory, taken = kind.tile_memory, []
    monkeypatch.setattr(kind, "tile_memory", lambda self, n: taken.append(n) or memory(self, n))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in layer.items()}
    log_probs, entropy = fast(**leaves, targets=targets, workspace_bytes=size)
    g, h = upstream(5, DEVICE)
    loss = (log_probs * g + entropy * h).sum()
    grads = []
    for _ in range(3):
        taken.clear()
        grads.append(torch.autograd.grad(loss, list(leaves.values()), retain_graph=True))
        assert sum(taken) <= budget.kept
    for again in grads[1:]:
        for first, second in zip(grads[0], again, strict=True):
            torch.testing.assert_close(second, first, rtol=2 * cases.PLAIN_SLACK[dtype], atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(grads[1], grads[2], strict=True))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_only_what_is_needed_gets_a_gradient(dtype):
    layer, targets = layer_of(LinearCase("frozen", 6, 16, 40), dtype)
    both = evaluate(fast, layer, targets, "log_probs")
    g, _ = upstream(6, DEVICE)
    for name in layer:
        leaf = layer[name].clone().requires_grad_()
        out = linear_logp(**(layer | {name: leaf}), targets=targets, impl="triton")
        (out * g).sum().backward()
        assert torch.equal(leaf.grad, both[f"d_{name}"])
    bias = torch.zeros(40, dtype=dtype, device=DEVICE, requires_grad=True)
    (linear_logp(**layer, targets=targets, bias=bias, impl="triton") * g).sum().backward()
    truth = compute_truth(layer | {"bias": bias.detach()}, targets, "log_probs")
    assert not contract_violations({"d_bias": bias.grad}, {"d_bias": truth["d_bias"]}, dtype, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("how", ["no_grad", "frozen"])
def test_without_gradients_nothing_is_kept(dtype, how, monkeypatch):
    """Reference and old log-probs need no gradient: the exponential head keeps no tile, the other head one to pass
    through."""
    layer, targets = layer_of(LinearCase("forward", 5, 16, 1500), dtype)
    kind = type(make_head(problem_of(layer, targets)))
    memory, taken = kind.tile_memory, []
    monkeypatch.setattr(kind, "tile_memory", lambda self, n: taken.append(n) or memory(self, n))
    leaves = {name: tensor.clone().requires_grad_(how == "no_grad") for name, tensor in layer.items()}
    with torch.set_grad_enabled(how == "frozen"):
        log_probs, entropy = fast(**leaves, targets=targets)
    assert not log_probs.requires_grad and not entropy.requires_grad
    assert len(taken) == (0 if kind is ExpHead else 1)
    truth = formula(**layer, targets=targets)
    for got, want in zip((log_probs, entropy), truth, strict=True):
        assert (got - want).abs().max() <= cases.CONTRACTS["linear_logp"].outputs["bfloat16"].bound(want)


def test_entropy_as_a_metric_changes_no_bit():
    layer, targets = layer_of(LinearCase("metric", 9, 16, 300), BF16)
    with_entropy = evaluate(fast, layer, targets, "log_probs")
    without = evaluate(
        lambda **call: (linear_logp(**call, impl="triton"), torch.zeros(9)), layer, targets, "log_probs"
    )
    for name in ("log_probs", "d_hidden", "d_weight"):
        assert torch.equal(with_entropy[name], without[name])


@pytest.mark.parametrize("uses", ["log_probs", "both"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_same_bits_every_time(dtype, uses):
    layer, targets = layer_of(LinearCase("bits", 20, 24, 300), dtype)
    first, second = (evaluate(fast, layer, targets, uses, temperature=0.9) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_tokens_have_gradients_of_zero():
    for dtype in (BF16, FP32):
        layer, targets = layer_of(LinearCase("none", 0, 8, 16), dtype, bias=dtype == FP32)
        results = evaluate(fast, layer, targets)
        assert results["log_probs"].shape == results["entropy"].shape == (0,)
        assert results["d_hidden"].shape == (0, 8)
        for name in results.keys() & {"d_weight", "d_bias"}:
            assert torch.equal(results[name], torch.zeros_like(results[name]))


def test_the_reference_agrees_and_is_what_the_mode_falls_back_to():
    layer, targets = layer_of(LinearCase("agree", 9, 16, 60), BF16)
    options = {"temperature": 0.7, "vocab_size": 50}
    targets = targets % 50
    triton = evaluate(fast, layer, targets, **options)
    reference = evaluate(
        partial(linear_logp, impl="reference", return_entropy=True), layer, targets, **options
    )
    assert not contract_violations(triton, reference, BF16, BF16)
    with using("off"):
        off = evaluate(partial(linear_logp, return_entropy=True), layer, targets, **options)
    assert all(torch.equal(off[name], reference[name]) for name in off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_forward_alone_goes_in_blocks_where_the_workspace_is_small(dtype):
    """A forward alone is not bounded by the memory of a backward; rows do not depend on their block."""
    case = LinearCase("blocks", 300, 16, 272, vocab_size=250)
    hidden, weight, targets = case.inputs(dtype, DEVICE)
    options = {"vocab_size": 250, "return_entropy": True, "impl": "triton"}
    temperature = torch.linspace(0.5, 2, 300, device=DEVICE)
    # A row takes 64 bytes of hidden and 64 or 512 of statistics, and two narrow tiles of 272 columns at most.
    small = 130 * (64 + 512 + 2 * 272 * 4) if dtype == torch.float32 else 130 * (64 + 64 + 272 * 2)
    with torch.no_grad():
        whole = linear_logp(hidden, weight, targets, temperature=temperature, **options)
        blocks = linear_logp(
            hidden, weight, targets, temperature=temperature, workspace_bytes=small, **options
        )
        with pytest.raises(ValueError, match="workspace_bytes must be >= .* give 128 tokens at least"):
            linear_logp(hidden, weight, targets, workspace_bytes=small // 2, **options)
    for want, got in zip(whole, blocks, strict=True):
        assert torch.equal(want, got)
    with pytest.raises(ValueError, match="workspace_bytes must be >= .* give 300 tokens at least"):
        linear_logp(hidden.requires_grad_(), weight, targets, workspace_bytes=small, **options)
