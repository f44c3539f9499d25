"""Compares `linear_token_loss` over the kernels with the float64 formula: blocks of tokens, the buffer of the weight
gradient, tiles that are computed again, and `grpo_loss` with all its terms inside."""

from dataclasses import dataclass

import pytest
import torch
from hardware_rounding import nearest  # noqa: F401

from rl_kernel import grpo_loss, linear_logp, linear_token_loss
from rl_kernel.ops.grpo_loss import cases as grpo_cases
from rl_kernel.ops.linear_logp.cases import (
    LinearCase,
    acceptance_violations,
    contract_violations,
    formula,
    plain,
    upstream,
)

pytest.importorskip("triton", reason="Triton is not installed")

from rl_kernel.ops.linear_logp.arguments import Task
from rl_kernel.ops.linear_logp.autograd import make_head, prepared
from rl_kernel.ops.linear_logp.head import HeadProblem
from rl_kernel.vocab import VocabShard

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.usefixtures("nearest"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = LinearCase("blocks", 260, 16, 100, vocab_size=90)
"""A case with three blocks of at most 128 tokens, because the workspace holds no more."""
TILES = LinearCase("tiles", 140, 16, 1500, vocab_size=1490)
"""A case with more columns than the narrowest tile."""


@dataclass
class Recorder:
    """A loss that records its arguments, and the plans of the heads that computed them."""

    tokens: int
    entropy: bool = True

    def __post_init__(self):
        self.g, self.h = upstream(self.tokens, DEVICE)
        self.rows, self.budgets = [], []

    def __call__(self, log_probs, entropy, rows):
        self.rows.append((rows.start, rows.stop))
        assert log_probs.shape == (rows.stop - rows.start,)
        loss = (log_probs * self.g[rows]).sum()
        if self.entropy:
            loss = loss + (entropy * self.h[rows]).sum()
        return loss, {"probs": log_probs.exp(), "first": torch.full_like(log_probs, rows.start)}


@pytest.fixture
def recorder(monkeypatch):
    """Makes a Recorder that also records each block's budget."""

    def make(tokens, **kwargs):
        made = Recorder(tokens, **kwargs)
        for kind in {type(make_head(problem_of(*layer_of(BLOCKS, dtype)))) for dtype in (BF16, FP32)}:
            forward = kind.forward

            def spy(self, budget, with_entropy, forward=forward):
                made.budgets.append(budget)
                return forward(self, budget, with_entropy)

            monkeypatch.setattr(kind, "forward", spy)
        return made

    return make


def layer_of(case, dtype, seed=0):
    hidden, weight, targets = case.inputs(dtype, DEVICE, seed)
    return {"hidden": hidden, "weight": weight}, targets


def problem_of(layer, targets):
    stored, dtype = len(layer["weight"]), layer["weight"].dtype
    shard = VocabShard(0, stored, None, None, stored)
    rounding = None if dtype == FP32 else dtype
    task = Task(targets, 1.0, None, shard, rounding)
    return prepared(HeadProblem(layer["hidden"], layer["weight"], None, task))


def workspace(layer, targets, rows, columns, entropy=True):
    """Returns the bytes in which `columns` columns of `rows` rows fit."""
    costs = make_head(problem_of(layer, targets)).costs(entropy)
    return rows * (costs.row + columns * costs.element)


def run(loss, layer, targets, **options):
    """Returns outputs and gradients as `evaluate` does, and the result itself."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in layer.items()}
    result = linear_token_loss(
        **leaves, targets=targets, token_loss=loss, return_entropy=True, impl="triton", **options
    )
    result.loss.backward()
    found = {"log_probs": result.log_probs, "entropy": result.entropy}
    return found | {f"d_{name}": x.grad for name, x in leaves.items() if x.grad is not None}, result


def by_autograd(op, loss, layer, targets, dtype=None, **options):
    leaves = {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in layer.items()
    }
    outputs = op(**leaves, targets=targets, **options)
    loss(*outputs, slice(0, len(targets)))[0].backward()
    found = {"log_probs": outputs[0].detach(), "entropy": outputs[1].detach()}
    return found | {f"d_{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("where", ["autograd", "weight_grad"])
@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow), FP32], ids=str)
def test_blocks_of_tokens(recorder, dtype, blocks, where):
    """Without `weight_grad`, the gradient of several blocks is summed in float32, and the workspace must hold this
    sum."""
    layer, targets = layer_of(BLOCKS, dtype)
    loss = recorder(260)
    temperature = torch.linspace(0.5, 1.5, 260, device=DEVICE)
    options = {"temperature": temperature, "vocab_size": 90}
    buffer = torch.full((100, 16), 2.0, device=DEVICE) if where == "weight_grad" else None
    size = workspace(layer, targets, 260 if blocks == 1 else 130, 100)
    if blocks == 3 and buffer is None:
        size += 100 * 16 * 4
    actual, result = run(loss, layer, targets, workspace_bytes=size, weight_grad=buffer, **options)
    assert loss.rows == {1: [(0, 260)], 3: [(0, 128), (128, 256), (256, 260)]}[blocks]
    assert all(budget.kept == 100 for budget in loss.budgets) and len(loss.budgets) == blocks
    if buffer is not None:
        assert "d_weight" not in actual
        actual["d_weight"] = buffer - 2
    truth = by_autograd(formula, loss, layer, targets, torch.float64, **options)
    assert not contract_violations(actual, truth, dtype, dtype)
    same = by_autograd(plain, loss, layer, targets, **options)
    assert not acceptance_violations([(actual, same, truth)], dtype)
    torch.testing.assert_close(result.metrics["probs"], result.log_probs.exp())
    starts = torch.tensor([first for first, last in loss.rows[:blocks] for _ in range(first, last)])
    assert torch.equal(result.metrics["first"].cpu(), starts.float())
    whole, _ = loss(truth["log_probs"], truth["entropy"], slice(0, 260))
    assert result.loss.item() == pytest.approx(whole.item(), abs={BF16: 0.2, FP16: 0.02, FP32: 1e-3}[dtype])


@pytest.mark.slow
def test_blocks_and_one_block_give_the_same_numbers(recorder):
    layer, targets = layer_of(BLOCKS, FP32)
    results = []
    for rows in (260, 130):
        buffer = torch.zeros(100, 16, device=DEVICE)
        size = workspace(layer, targets, rows, 100)
        actual, _ = run(recorder(260), layer, targets, workspace_bytes=size, weight_grad=buffer)
        results.append(actual | {"d_weight": buffer})
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_tiles_are_computed_again_where_a_sum_would_not_fit(recorder, dtype):
    """All tokens are in one block, because a second block would need the float32 sum."""
    columns = 1500 if dtype == BF16 else 2600
    case = LinearCase("tiles", 140, 16, columns, vocab_size=columns - 10)
    layer, targets = layer_of(case, dtype)
    loss = recorder(140)
    options = {"temperature": 0.9, "vocab_size": columns - 10}
    fits = 1300 if dtype == BF16 else 2100
    actual, _ = run(loss, layer, targets, workspace_bytes=workspace(layer, targets, 140, fits), **options)
    assert loss.rows == [(0, 140)]
    assert [budget.kept for budget in loss.budgets] == [1280 if dtype == BF16 else 1024]
    truth = by_autograd(formula, loss, layer, targets, torch.float64, **options)
    assert not contract_violations(actual, truth, dtype, dtype)
    assert not acceptance_violations(
        [(actual, by_autograd(plain, loss, layer, targets, **options), truth)], dtype
    )


def test_too_little_workspace_names_what_is_needed(recorder):
    layer, targets = layer_of(TILES, BF16)
    need = workspace(layer, targets, 128, 1024)
    buffer = torch.zeros(1500, 16, device=DEVICE)
    with pytest.raises(ValueError, match=rf"workspace_bytes must be >= {need}, got {need - 1}; .* 1 MiB"):
        run(recorder(140), layer, targets, workspace_bytes=need - 1, weight_grad=buffer)
    assert not buffer.any()


def test_the_sum_and_its_blocks_fit_together(recorder, monkeypatch):
    """The float32 sum and one block's tile are in memory at the same time."""
    layer, targets = layer_of(BLOCKS, BF16)
    loss = recorder(260)
    size = workspace(layer, targets, 130, 100) + 100 * 16 * 4
    kind = type(make_head(problem_of(layer, targets)))
    memory, taken = kind.tile_memory, []
    monkeypatch.setattr(
        kind, "tile_memory", lambda self, n: taken.append(n * len(self.problem.hidden)) or memory(self, n)
    )
    run(loss, layer, targets, workspace_bytes=size)
    assert len(loss.rows) == 3 and max(taken) == 128 * 100
    # With one byte less for the blocks, not even a block of 128 tokens fits next to the sum.
    loss.rows.clear()
    with pytest.raises(ValueError, match="give 260 tokens at least"):
        run(loss, layer, targets, workspace_bytes=workspace(layer, targets, 128, 100) + 100 * 16 * 4 - 1)
    assert loss.rows == []


@pytest.mark.parametrize("entropy", [False, True], ids=["log_probs", "both"])
def test_the_same_as_linear_logp_and_autograd(recorder, entropy):
    """One block gives the same bits, because the same kernels run in the same order."""
    layer, targets = layer_of(LinearCase("same", 20, 24, 150), BF16)
    loss = recorder(20, entropy=entropy)
    one_pass, _ = run(loss, layer, targets)

    def op(**call):
        return linear_logp(**call, impl="triton", return_entropy=True)

    two_passes = by_autograd(op, loss, layer, targets)
    assert all(torch.equal(one_pass[name], two_passes[name]) for name in two_passes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_same_bits_every_time(recorder, dtype):
    layer, targets = layer_of(BLOCKS, dtype)
    results = []
    for _ in range(2):
        buffer = torch.zeros(100, 16, device=DEVICE)
        size = workspace(layer, targets, 130, 100)
        actual, _ = run(recorder(260), layer, targets, workspace_bytes=size, weight_grad=buffer)
        results.append([*actual.values(), buffer])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("options", grpo_cases.OPTIONS.values(), ids=grpo_cases.OPTIONS)
def test_grpo_loss_inside(options):
    """Every term is on, over two blocks whose masked tokens hold NaN. The logits are not rounded, because a log-prob
    must not fall on the other side of a clip bound."""
    layer, targets = layer_of(LinearCase("grpo", 136, 16, 100, vocab_size=90), BF16)
    wide = {name: tensor.double() for name, tensor in layer.items()}
    log_probs, _ = formula(**wide, targets=targets, vocab_size=90)
    columns = grpo_cases.GrpoLossCase("", 136).inputs(torch.float32, DEVICE)
    own = columns.pop("log_probs")
    columns.pop("entropy")
    for name in ("old_log_probs", "ref_log_probs"):
        columns[name] = (log_probs + (columns[name] - own).double()).float()

    def token_loss(new, entropy, rows, op=grpo_loss, **kwargs):
        block = {name: column[rows] for name, column in columns.items()}
        return op(**block, log_probs=new, entropy=entropy, **options, **kwargs)

    def fast(new, entropy, rows):
        return token_loss(new, entropy, rows, impl="triton")

    def slow(new, entropy, rows):
        return token_loss(new, entropy, rows, lambda **call: grpo_cases.formula(
            {n: call.pop(n) for n in (*columns, "log_probs", "entropy")}, **call
        ))  # fmt: skip

    size = workspace(layer, targets, 130, 100) + 100 * 16 * 4
    settings = {"vocab_size": 90, "logits_dtype": "float32", "workspace_bytes": size}
    actual, result = run(fast, layer, targets, **settings)
    truth = by_autograd(formula, slow, layer, targets, torch.float64, vocab_size=90)
    assert not contract_violations(actual, truth, BF16, FP32)
    loss, metrics = slow(truth["log_probs"], truth["entropy"], slice(0, 136))
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    assert result.metrics.keys() == metrics.keys()
    for name, want in metrics.items():
        torch.testing.assert_close(result.metrics[name].double(), want, rtol=1e-3, atol=1e-4)


def test_masked_tokens_with_targets_that_are_none(monkeypatch):
    """Padding tokens have a target of -100; their log-prob is NaN, and a masked loss ignores it."""
    monkeypatch.setattr("rl_kernel.vocab.reads_values", lambda tensor: False)
    layer, targets = layer_of(LinearCase("padding", 20, 16, 60), BF16)
    mask = torch.arange(20, device=DEVICE) % 4 > 0
    advantages = torch.linspace(-1, 1, 20, device=DEVICE)
    old = torch.full((20,), -4.0, device=DEVICE)

    def loss(log_probs, entropy, rows):
        return grpo_loss(log_probs, old[rows], advantages[rows], mask[rows], 15.0)

    padded, result = run(loss, layer, torch.where(mask, targets, -100))
    clean, _ = run(loss, layer, targets)
    assert result.loss.isfinite() and torch.equal(result.log_probs.isnan(), ~mask)
    for name in ("d_hidden", "d_weight"):
        torch.testing.assert_close(padded[name], clean[name])
    assert not padded["d_hidden"][~mask].any()
