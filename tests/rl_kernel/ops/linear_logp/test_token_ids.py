"""Compares log-probs of given ids, and `linear_top`, with all logits in float64, in one process and over two."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks

from rl_kernel import linear_logp, linear_token_loss, linear_top
from rl_kernel.contract import CONTRACTS, Tolerance, max_error
from rl_kernel.dispatch import interpreted
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.cases import LinearCase
from rl_kernel.token_ids import NONE, sort_keys, split_keys

pytest.importorskip("triton", reason="Triton is not installed")
from hardware_rounding import nearest  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["reference", "triton"]
CASES = (
    LinearCase("no_tokens", 0, 5, 16),
    LinearCase("one_token", 1, 5, 16),
    LinearCase("one_column", 4, 5, 1),
    LinearCase("tiny", 7, 5, 11),
    LinearCase("padded", 9, 8, 64, vocab_size=50),
)
TINY = CASES[3]
ALL = (1, 1, 1)


def ids_of(case, targets, count=4):
    """Returns `count` different ids per token (target in every second row); one token has two ids, one has no id."""
    count = min(count, case.real)
    random = torch.Generator().manual_seed(1)
    rows = []
    for i, target in enumerate(targets.tolist()):
        row = torch.randperm(case.real, generator=random)[:count].tolist()
        if i % 2 == 0 and target not in row:
            row[0] = target
        rows.append(row)
    ids = torch.tensor(rows, dtype=torch.int32).view(len(targets), count).to(DEVICE)
    if len(ids) > 3:
        ids[1, 2:], ids[3] = NONE, NONE
    return ids


def inputs(case, dtype=torch.float32):
    hidden, weight, targets = (x.to(DEVICE) for x in case.inputs(dtype))
    bias = torch.linspace(-1, 1, case.vocab).to(DEVICE, dtype)
    return hidden, weight, bias, targets, torch.linspace(0.5, 1.5, case.tokens, device=DEVICE)


def formula(hidden, weight, bias, targets, ids, *, temperature=1.0, vocab_size=None, rounding=None, cap=None):
    logits = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if rounding is not None:
        logits = logits + (logits.to(rounding).double() - logits).detach()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[:, None]
    log_p = torch.log_softmax(logits[:, :vocab_size] / temperature, -1)
    picked = log_p.gather(1, ids.long().clamp(min=0)).masked_fill(ids == NONE, -torch.inf)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), picked


def gains(tokens, count):
    random = torch.Generator().manual_seed(3)
    g, h = torch.randn(2, tokens, generator=random).to(DEVICE)
    return g, h, torch.randn(tokens, count, generator=random).to(DEVICE)


def loss_of(outputs, ids, weights=ALL, rows=slice(None)):
    """Returns a sum of the outputs with random weights; a weight of None leaves a term out of the graph."""
    g, h, k = (x[rows] for x in gains(len(ids), ids.shape[1]))
    some = ids[rows]
    id_log_probs = torch.where(some == NONE, 0, outputs[2])
    terms = (g * outputs[0]).sum(), (h * outputs[1]).sum(), (k * id_log_probs).sum()
    return sum(w * term for w, term in zip(weights, terms, strict=True) if w is not None)


def with_grads(op, ids, *layer, weights=ALL):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in layer]
    outputs = op(*leaves)
    loss_of(outputs, ids, weights).backward()
    return *(out.detach() for out in outputs), *(x.grad for x in leaves if x is not None)


def check(actual, truth, outputs, gradients):
    assert torch.equal(actual[2].isinf(), truth[2].isinf())
    for got, want, bound in zip(actual, truth, [outputs] * 3 + [gradients] * 3, strict=False):
        assert got.shape == want.shape
        got, want = (torch.nan_to_num(x.double(), neginf=0.0) for x in (got, want))
        assert max_error(got, want) <= bound.bound(want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_every_case_keeps_the_contract(impl, case, with_bias):
    hidden, weight, bias, targets, temperature = inputs(case)
    layer = hidden, weight, bias if with_bias else None
    ids = ids_of(case, targets)
    options = {"temperature": temperature, "vocab_size": case.vocab_size}

    def op(hidden, weight, bias):
        return linear_logp(
            hidden, weight, targets, bias=bias, ids=ids, return_entropy=True, impl=impl, **options
        )

    truth = with_grads(lambda *x: formula(*x, targets, ids, **options), ids, *layer)
    actual = with_grads(op, ids, *layer)
    check(actual, truth, Tolerance(3e-6, 1e-6), Tolerance(1e-6, 3e-6))
    log_probs, id_log_probs = linear_logp(*layer[:2], targets, bias=layer[2], ids=ids, impl=impl, **options)
    torch.testing.assert_close(log_probs, actual[0])
    torch.testing.assert_close(id_log_probs, actual[2])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("logits_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(impl, dtype, logits_dtype):
    hidden, weight, _, targets, temperature = inputs(TINY, dtype)
    ids = ids_of(TINY, targets)
    options = {"ids": ids, "return_entropy": True, "logits_dtype": logits_dtype, "impl": impl}
    actual = with_grads(
        lambda h, w: linear_logp(h, w, targets, temperature=temperature, **options), ids, hidden, weight
    )
    rounding = dtype if logits_dtype is None else None
    truth = with_grads(
        lambda h, w: formula(h, w, None, targets, ids, temperature=temperature, rounding=rounding),
        ids,
        hidden.double(),
        weight.double(),
    )
    unit = torch.finfo(dtype).eps
    outputs = CONTRACTS["linear_logp"].outputs["float32"] if rounding is None else Tolerance(unit, 2 * unit)
    check(actual, truth, outputs, Tolerance(1e-7, 2 * unit))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "weights", [(0, 0, 1), (None, None, 1), (1, None, 1), (None, 1, 1), (1, 1, None)], ids=str
)
def test_each_gradient_alone(impl, weights):
    hidden, weight, _, targets, temperature = inputs(TINY)
    ids = ids_of(TINY, targets)
    options = {"temperature": temperature, "ids": ids, "return_entropy": True, "impl": impl}
    actual = with_grads(
        lambda h, w: linear_logp(h, w, targets, **options), ids, hidden, weight, weights=weights
    )
    truth = with_grads(
        lambda h, w: formula(h, w, None, targets, ids, temperature=temperature),
        ids,
        *(hidden, weight),
        weights=weights,
    )
    check(actual, truth, Tolerance(3e-6, 1e-6), Tolerance(1e-6, 3e-6))


@pytest.mark.parametrize("impl", IMPLS)
def test_soft_cap(impl):
    hidden, weight, _, targets, temperature = inputs(TINY)
    ids = ids_of(TINY, targets)
    options = {"temperature": temperature, "ids": ids, "return_entropy": True, "logit_cap": 1.5, "impl": impl}
    actual = with_grads(lambda h, w: linear_logp(h, w, targets, **options), ids, hidden, weight)
    truth = with_grads(
        lambda h, w: formula(h, w, None, targets, ids, temperature=temperature, cap=1.5), ids, hidden, weight
    )
    check(actual, truth, Tolerance(3e-6, 1e-6), Tolerance(1e-6, 5e-6))


def test_by_hand():
    """p ~ (1, 3, 4, 8) / 16. The log-probs of ids 3 and 0 have the weights 2 and 5, that of the target, id 3, has 7."""
    weight = torch.tensor([[0.0], [math.log(3)], [math.log(4)], [math.log(8)]], device=DEVICE)
    p = [1 / 16, 3 / 16, 4 / 16, 8 / 16]
    for impl in IMPLS:
        leaf = weight.clone().requires_grad_()
        log_probs, found = linear_logp(
            torch.ones(1, 1, device=DEVICE),
            leaf,
            torch.tensor([3], device=DEVICE),
            ids=torch.tensor([[3, 0, NONE]], device=DEVICE),
            impl=impl,
        )
        assert found[0].tolist() == pytest.approx([math.log(1 / 2), math.log(1 / 16), -math.inf], rel=1e-6)
        (7 * log_probs.sum() + 2 * found[0, 0] + 5 * found[0, 1]).backward()
        want = [(5 if i == 0 else 9 if i == 3 else 0) - 14 * x for i, x in enumerate(p)]
        assert leaf.grad[:, 0].tolist() == pytest.approx(want, rel=1e-5)


def test_gradcheck_of_kept_and_recomputed_tiles(monkeypatch):
    hidden, weight, _, targets, _ = inputs(TINY, torch.float64)
    ids = ids_of(TINY, targets)
    ids[ids == NONE] = 0  # a difference of infinities is NaN
    ids[3] = torch.tensor([1, 2, 3, 4])
    ids = ids[:, :2].contiguous()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def op(hidden, weight):
        return linear_logp(hidden, weight, targets, temperature=0.8, ids=ids, return_entropy=True)

    assert torch.autograd.gradcheck(op, leaves)
    monkeypatch.setattr("rl_kernel.ops.linear_logp.reference.KEPT_ELEMENTS", 0)
    monkeypatch.setattr("rl_kernel.vocab.TILE_ELEMENTS", 22)
    monkeypatch.setattr("rl_kernel.vocab.TILE_MIN_ROWS", 1)
    assert torch.autograd.gradcheck(op, leaves)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("workspace", [2**30, 120_000], ids=["one block", "two blocks"])
def test_one_pass_loss(impl, workspace):
    case = LinearCase("one_pass", 150, 4, 60, vocab_size=55)
    hidden, weight, bias, targets, temperature = inputs(case)
    ids, seen = ids_of(case, targets), []

    def token_loss(log_probs, entropy, rows, id_log_probs):
        seen.append(rows)
        return loss_of((log_probs, entropy, id_log_probs), ids, rows=rows), {}

    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    options = {"temperature": temperature, "vocab_size": case.vocab_size}
    result = linear_token_loss(
        *leaves[:2],
        targets,
        token_loss,
        bias=leaves[2],
        ids=ids,
        return_entropy=True,
        workspace_bytes=workspace,
        impl=impl,
        **options,
    )
    result.loss.backward()
    layer = [x.double() for x in (hidden, weight, bias)]
    truth = with_grads(lambda *x: formula(*x, targets, ids, **options), ids, *layer)
    found = result.log_probs, result.entropy, *(x.grad for x in leaves)
    for got, want in zip(found, (*truth[:2], *truth[3:]), strict=True):
        assert max_error(got, want) <= Tolerance(1e-6, 5e-6).bound(want)
    assert len(seen) == (2 if impl == "triton" and workspace < 2**30 else 1)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_loss_of_ids_alone(impl):
    """The target's log-prob has no gradient, and a loss without ids has gradients of zero."""
    hidden, weight, _, targets, _ = inputs(TINY)
    ids = ids_of(TINY, targets)
    for weights in ((None, None, 1), (None, None, 0)):
        leaf = weight.clone().requires_grad_()

        def token_loss(log_probs, entropy, rows, id_log_probs, weights=weights):
            return loss_of((log_probs, log_probs, id_log_probs), ids, weights, rows), {}

        linear_token_loss(hidden, leaf, targets, token_loss, ids=ids, impl=impl).loss.backward()
        truth = with_grads(lambda w: formula(hidden, w, None, targets, ids), ids, weight, weights=weights)
        assert max_error(leaf.grad, truth[3]) <= Tolerance(1e-6, 5e-6).bound(truth[3])


def test_same_bits_every_time():
    hidden, weight, _, targets, _ = inputs(TINY, torch.bfloat16)
    ids = ids_of(TINY, targets)
    options = {"ids": ids, "return_entropy": True, "impl": "triton"}
    first, second = (
        with_grads(lambda h, w: linear_logp(h, w, targets, **options), ids, hidden, weight) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:3], r"ids must have shape \[7, K\], got \[3, 4\]"),
        (lambda ids: ids.float(), "ids must be one of int64, int32, got float32"),
        (lambda ids: ids + 9, r"ids must be -1 or lie in \[0, 11\), got values from 8 to "),
        (lambda ids: ids - 5, r"ids must be -1 or lie in \[0, 11\), got values from -6 to "),
        (lambda ids: ids * 0, "ids must differ for a token, got 0 twice for token 0; drop one"),
    ],
)
def test_bad_ids(change, message):
    if DEVICE == "cuda" and "values from" in message:
        return  # checks do not read the values on a GPU
    hidden, weight, _, targets, _ = inputs(TINY)
    with pytest.raises(ValueError, match=message):
        linear_logp(hidden, weight, targets, ids=change(ids_of(TINY, targets)))


def test_not_with_a_kept_set():
    hidden, weight, _, targets, _ = inputs(TINY)
    kept = KeptTokens.from_lists([[target] for target in targets.tolist()], DEVICE)
    with pytest.raises(ValueError, match="keep_mask must be left out with ids, got both"):
        linear_logp(hidden, weight, targets, ids=ids_of(TINY, targets), keep_mask=kept)


def by_rule(log_p, count):
    """Returns the largest log-probs first, and of equal values the lowest id first."""
    order = torch.sort(log_p, dim=1, descending=True, stable=True).indices[:, :count]
    return order, log_p.gather(1, order)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_top(impl, dtype, case):
    """With small integers, all products are exact and many logits are equal."""
    hidden, weight, targets = (x.to(DEVICE) for x in case.inputs(torch.float32))
    hidden, weight = ((2 * x).round().to(dtype) for x in (hidden, weight))
    log_probs, top = linear_top(
        hidden, weight, targets, 3, vocab_size=case.vocab_size, temperature=0.5, impl=impl
    )
    log_p = torch.log_softmax((hidden.double() @ weight.double().t())[:, : case.vocab_size] * 2, -1)
    ids, values = by_rule(log_p, 3)
    known = min(3, case.real)
    assert top.ids.dtype == torch.int32 and top.log_probs.dtype == torch.float32
    assert torch.equal(top.ids[:, :known].long(), ids)
    assert max_error(top.log_probs[:, :known], values) <= 1e-5
    assert (top.ids[:, known:] == NONE).all() and top.log_probs[:, known:].isinf().all()
    assert max_error(log_probs, log_p.gather(1, targets[:, None])[:, 0]) <= 1e-5


def test_top_in_tiles_and_blocks():
    case = LinearCase("tiles", 140, 8, 5000, vocab_size=4990)
    hidden, weight, targets = (x.to(DEVICE) for x in case.inputs())
    whole = linear_top(hidden, weight, targets, 5, vocab_size=case.vocab_size, impl="reference")
    log_probs, top = linear_top(
        hidden, weight, targets, 5, vocab_size=case.vocab_size, workspace_bytes=12 * 2**20, impl="triton"
    )
    torch.testing.assert_close(log_probs, whole[0])
    torch.testing.assert_close(top.log_probs, whole[1].log_probs)
    assert (
        top.ids == whole[1].ids
    ).float().mean() > 0.99  # two log-probs may be equal except for the last digit
    with pytest.raises(ValueError, match="count must be >= 1, got 0; use linear_logp for the targets alone"):
        linear_top(hidden, weight, targets, 0)


def test_keys_order_as_values_and_then_ids():
    values = torch.tensor([-1.5, 0.0, 2.0, -3.0, -math.inf, 2.0])
    ids = torch.tensor([7, 0, 2**31 - 1, 3, 4, 5])
    keys = sort_keys(values, ids)
    assert keys.argsort(descending=True).tolist() == [5, 2, 1, 0, 3, 4]
    again = split_keys(keys)
    assert torch.equal(again[0], values) and torch.equal(again[1].long(), ids)


SPLITS = {"uneven": ([0, 7], 13, None), "padded": ([0, 8], 16, 13), "all padding": ([0, 8], 16, 7)}
TOKENS = 11


def part(split, impl, first, last, group):
    """Returns outputs and gradients on the columns [first, last), and the top."""
    _, end, vocab_size = SPLITS[split]
    case = LinearCase(split, TOKENS, 5, end, vocab_size)
    hidden, weight, _, targets, temperature = inputs(case)
    ids = ids_of(case, targets)
    options = {"temperature": temperature, "vocab_size": vocab_size, "impl": impl}
    options |= {"tp_group": group, "vocab_start": first}
    found = with_grads(
        lambda h, w: linear_logp(h, w, targets, ids=ids, return_entropy=True, **options),
        ids,
        *(hidden, weight[first:last]),
    )
    leaf = weight[first:last].clone().requires_grad_()

    def token_loss(log_probs, entropy, rows, id_log_probs):
        return loss_of((log_probs, entropy, id_log_probs), ids, rows=rows), {}

    linear_token_loss(
        hidden, leaf, targets, token_loss, ids=ids, return_entropy=True, **options
    ).loss.backward()
    return *found, leaf.grad, *linear_top(hidden, weight[first:last], targets, 9, **options)[1]


def work(rank, path):
    dist.init_process_group("gloo", f"file://{path}/store", timedelta(seconds=60), world_size=2, rank=rank)
    found = {}
    for split, (starts, end, _) in SPLITS.items():
        for impl in IMPLS:
            found[split, impl] = part(split, impl, starts[rank], [*starts, end][rank + 1], dist.group.WORLD)
    torch.save(found, f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not interpreted(), reason="the processes have no GPU of their own")
def test_two_processes_are_as_one(tmp_path):
    on_ranks(work, str(tmp_path), ranks=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for split, (starts, end, _) in SPLITS.items():
        for impl in IMPLS:
            whole = part(split, impl, 0, end, None)
            for rank, found in enumerate(ranks):
                mine = slice(starts[rank], [*starts, end][rank + 1])
                wanted = [x[mine] if i in (4, 5) else x for i, x in enumerate(whole)]
                for i, (got, want) in enumerate(zip(found[split, impl], wanted, strict=True)):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6, msg=f"{split} {impl} {i}")
