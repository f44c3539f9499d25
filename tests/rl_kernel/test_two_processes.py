"""Compares vocabulary- and data-parallel operators over two gloo processes with the same call in one process."""

import math

import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks

from rl_kernel import linear_logp, logp, masked_mean, masked_sum, masked_whiten, vocab
from rl_kernel.dispatch import interpreted
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.cases import LinearCase
from rl_kernel.ops.logp.cases import formula

SPLITS = {
    # first columns of the ranks' shards, end, real vocabulary
    "uneven": ([0, 7], 13, None),
    "padded": ([0, 8], 16, 13),
    "second shard all padding": ([0, 8], 16, 7),
    "second shard one real column": ([0, 8], 16, 9),
}
TOKENS = 11
IMPLS = ["reference", "triton"] if interpreted() else ["reference"]


def problem(split, dtype, tokens=TOKENS):
    _, end, vocab_size = SPLITS[split]
    hidden, weight, targets = LinearCase(split, tokens, 5, end, vocab_size).inputs(dtype, seed=end)
    # Logits are near -200: a rank without real columns must not raise the common maximum to 0.
    low = 200 if split == "second shard all padding" else 0
    bias = (torch.linspace(-1, 1, end) - low).to(dtype)
    temperature = torch.linspace(0.5, 2.0, tokens)
    return hidden, weight, bias, targets, temperature


def backward(outputs):
    g, h = torch.randn(2, len(outputs[0]), generator=torch.Generator().manual_seed(5)).to(outputs[0].dtype)
    (outputs[0] * g + outputs[1] * h).sum().backward()


def both_ops(split, dtype, first, last, group, tokens=TOKENS):
    """Returns outputs and gradients of linear_logp and of logp on the columns [first, last)."""
    hidden, weight, bias, targets, temperature = problem(split, dtype, tokens)
    kwargs = {"temperature": temperature, "tp_group": group, "return_entropy": True}
    kwargs |= {"vocab_size": SPLITS[split][2], "vocab_start": first}
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[first:last], bias[first:last])]
    linear = linear_logp(*leaves[:2], targets, bias=leaves[2], **kwargs)
    backward(linear)
    logits = (hidden @ weight.t())[:, first:last].clone().requires_grad_()
    plain = logp(logits, targets, **kwargs)
    backward(plain)
    return {
        "log_probs": linear[0],
        "entropy": linear[1],
        "d_hidden": leaves[0].grad,
        "d_weight": leaves[1].grad,
        "d_bias": leaves[2].grad,
        "logp log_probs": plain[0],
        "logp entropy": plain[1],
        "d_logits": logits.grad,
    }


def kept_of(targets, split):
    """Returns kept ids from one side of the split, from both sides, or no ids; the target is always among kept ids."""
    (_, middle), end, vocab_size = SPLITS[split]
    last = (vocab_size or end) - 1
    others = [[], [0], [last], [0, min(middle, last), last]]
    rows = [[target, *others[i % 4]] if i % 5 else [] for i, target in enumerate(targets.tolist())]
    return KeptTokens.from_lists(rows)


def logp_calls(split, first, last, group, tokens=TOKENS):
    """Returns outputs and gradients of logp, by implementation and kept set, on the columns [first, last)."""
    hidden, weight, _, targets, temperature = problem(split, torch.float32, tokens)
    kwargs = {"temperature": temperature, "tp_group": group, "vocab_size": SPLITS[split][2]}
    results = {}
    for impl in IMPLS:
        for kept in (None, kept_of(targets, split)):
            logits = 4 * (hidden @ weight.t())[:, first:last].clone().requires_grad_()
            logits.retain_grad()
            outputs = logp(
                logits,
                targets,
                vocab_start=first,
                keep_mask=kept,
                return_entropy=True,
                inplace_backward=impl == "triton",
                impl=impl,
                **kwargs,
            )
            backward(outputs)
            results[impl, kept is not None] = [*(out.detach() for out in outputs), logits.grad]
    return results


def linear_calls(split, first, last, group):
    """Returns outputs and gradients of linear_logp with a kept set, by implementation, on the columns [first, last)."""
    hidden, weight, bias, targets, temperature = problem(split, torch.float32)
    results = {}
    for impl in IMPLS:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight[first:last], bias[first:last])]
        outputs = linear_logp(
            *leaves[:2],
            targets,
            bias=leaves[2],
            temperature=temperature,
            tp_group=group,
            vocab_start=first,
            vocab_size=SPLITS[split][2],
            keep_mask=kept_of(targets, split),
            return_entropy=True,
            impl=impl,
        )
        backward(outputs)
        results[impl] = [*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)]
    return results


def unread_calls(rank):
    """Runs calls as a device does in auto mode, and returns the collectives of four calls and the results of
    unchecked values."""
    counts, gather = [], vocab.gather_stack
    before = vocab.reads_values, vocab.gather_stack

    def counting(value, group):
        counts.append(value.dtype)
        return gather(value, group)

    vocab.reads_values, vocab.gather_stack = lambda tensor: False, counting
    try:
        targets = torch.tensor([0, 8, -1])
        # No other test uses this layout, so its first call is here.
        out = [
            logp(torch.zeros(3, 3 + rank), targets, vocab_start=3 * rank, tp_group=dist.group.WORLD)
            for _ in range(3)
        ]
        with pytest.raises(ValueError, match="vocab_size must be <= 7, the columns of all shards, got 8"):
            logp(
                torch.zeros(3, 3 + rank),
                targets,
                vocab_start=3 * rank,
                vocab_size=8,
                tp_group=dist.group.WORLD,
            )
        with pytest.raises(ValueError, match="vocab_start must make the shards partition"):
            logp(torch.zeros(3, 2), targets, vocab_start=3 * rank, tp_group=dist.group.WORLD)
    finally:
        vocab.reads_values, vocab.gather_stack = before
    return counts, out


def on_rank(rank, folder):
    """Computes one process's results and saves them for the parent to compare."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    results = {}
    for split, (starts, end, _) in SPLITS.items():
        first, last = starts[rank], [*starts, end][rank + 1]
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            results[split, dtype] = both_ops(split, dtype, first, last, dist.group.WORLD)
        results[split] = logp_calls(split, first, last, dist.group.WORLD)
        results[split, "linear"] = linear_calls(split, first, last, dist.group.WORLD)
    results["no tokens"] = both_ops(
        "uneven", torch.float32, 7 * rank, 7 + 6 * rank, dist.group.WORLD, tokens=0
    )
    results["no tokens logp"] = logp_calls("uneven", 7 * rank, 7 + 6 * rank, dist.group.WORLD, tokens=0)
    results["unread"] = unread_calls(rank)
    results["errors"] = [error_of(*call) for call in bad_shards(rank)]
    values, mask = part(rank)
    reductions = (masked_sum, masked_mean, masked_whiten)
    results["masked"] = [op(values, mask, group=dist.group.WORLD) for op in reductions]
    results["kept mean"] = masked_whiten(values, mask, group=dist.group.WORLD, shift_mean=False)
    results["empty"] = [op(values, mask * 0, group=dist.group.WORLD) for op in reductions]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def bad_shards(rank):
    """Shards overlap, leave a gap, or miss the start; a call wants too many columns; a target is in no shard."""
    weight, target = torch.zeros(4, 2), torch.zeros(1).long()
    yield weight, target, {"vocab_start": 3 * rank}
    yield weight, target, {"vocab_start": 5 * rank}
    yield weight, target, {"vocab_start": 4 + 4 * rank}
    yield weight, target, {"vocab_start": 4 * rank, "vocab_size": 9}
    yield weight, target + 8, {"vocab_start": 4 * rank}
    yield weight, target + 6, {"vocab_start": 4 * rank, "vocab_size": 6}


def error_of(weight, target, kwargs):
    try:
        linear_logp(torch.zeros(1, 2), weight, target, tp_group=dist.group.WORLD, **kwargs)
    except ValueError as error:
        return str(error)
    return "no error"


def part(rank):
    """Returns ragged data-parallel parts; uncounted entries hold NaN."""
    values = [torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([8.0])][rank]
    return values, (~torch.isnan(values)).int()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_processes")
    on_ranks(on_rank, str(folder), ranks=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_vocabulary_parallel_equals_one_process(ranks, split, dtype):
    whole = both_ops(split, dtype, 0, SPLITS[split][1], None)
    parts = [rank[split, dtype] for rank in ranks]
    assert parts[0].keys() == whole.keys()
    # A gradient is rounded to bfloat16 once, from float32 sums in another order: they differ by half a unit at most.
    tolerance = {torch.float32: (1e-5, 1e-6), torch.float64: (1e-12, 1e-13), torch.bfloat16: (2**-7, 1e-6)}
    rtol, atol = tolerance[dtype]
    for name, want in whole.items():
        if name in ("d_weight", "d_bias"):
            got = torch.cat([p[name] for p in parts])
        elif name == "d_logits":
            got = torch.cat([p[name] for p in parts], 1)
        else:
            got = parts[0][name]
            assert torch.equal(got, parts[1][name]), f"{name} differs between ranks"
        torch.testing.assert_close(
            got, want, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("split", SPLITS)
def test_logp_over_two_processes_is_the_formula(ranks, split, impl, truncated):
    hidden, weight, _, targets, temperature = problem(split, torch.float32)
    logits = 4 * (hidden @ weight.t()).double().requires_grad_()
    logits.retain_grad()
    kept = kept_of(targets, split) if truncated else None
    want = formula(logits, targets, temperature, SPLITS[split][2], kept)
    backward(want)
    parts = [rank[split][impl, truncated] for rank in ranks]
    assert all(torch.equal(a, b) for a, b in zip(parts[0][:2], parts[1][:2], strict=True))
    got = [*parts[0][:2], torch.cat([p[2] for p in parts], 1)]
    for actual, truth in zip(got, [*want, logits.grad], strict=True):
        torch.testing.assert_close(actual.double(), truth.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("split", SPLITS)
def test_kept_tokens_of_linear_logp_over_two_processes(ranks, split, impl):
    hidden, weight, bias, targets, temperature = problem(split, torch.float32)
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = leaves[0] @ leaves[1].t() + leaves[2]
    want = formula(logits, targets, temperature, SPLITS[split][2], kept_of(targets, split))
    backward(want)
    parts = [rank[split, "linear"][impl] for rank in ranks]
    assert all(torch.equal(a, b) for a, b in zip(parts[0][:3], parts[1][:3], strict=True))
    got = [*parts[0][:3], *(torch.cat([p[i] for p in parts]) for i in (3, 4))]
    # One split's logits are near -200, where float32 has 1.5e-5 between neighbours.
    atol = 4e-5 if split == "second shard all padding" else 2e-6
    for actual, truth in zip(got, [*want, *(leaf.grad for leaf in leaves)], strict=True):
        torch.testing.assert_close(actual.double(), truth.detach(), rtol=1e-5, atol=atol)


def test_shards_are_compared_once_where_values_are_not_read(ranks):
    for counts, outputs in (rank["unread"] for rank in ranks):
        # The first call sends shard positions and statistics, two more calls send statistics. The wrong size sends
        # nothing; the wrong shards send positions.
        assert counts == [torch.int64] + [torch.float32] * 3 + [torch.int64]
        for out in outputs:
            assert out.isnan().tolist() == [False, True, True]
            assert out[0].item() == pytest.approx(-math.log(7), rel=1e-6)


def test_no_tokens_over_two_processes(ranks):
    for rank, rows in zip(ranks, (7, 6), strict=True):
        out = rank["no tokens"]
        assert out["log_probs"].shape == (0,) and out["d_hidden"].shape == (0, 5)
        assert torch.equal(out["d_weight"], torch.zeros(rows, 5))
        for log_probs, entropy, grad in rank["no tokens logp"].values():
            assert log_probs.shape == entropy.shape == (0,) and grad.shape == (0, rows)


def test_wrong_shards_are_an_error_on_every_rank(ranks):
    assert ranks[0]["errors"] == ranks[1]["errors"]
    partition = r"vocab_start must make the shards partition the vocabulary .* got "
    expected = [
        partition + r"\[\(0, 4\), \(3, 4\)\]; give",
        partition + r"\[\(0, 4\), \(5, 4\)\]; give",
        partition + r"\[\(4, 4\), \(8, 4\)\]; give",
        r"vocab_size must be <= 8, the columns of all shards, got 9",
        r"targets must lie in \[0, 8\), got values from 8 to 8",
        r"targets must lie in \[0, 6\), got values from 6 to 6",
    ]
    for text, pattern in zip(ranks[0]["errors"], expected, strict=True):
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(text)


def test_masked_reductions_see_all_ranks(ranks):
    # Counted: 1, 3 here and 8 there. Sum 12, mean 4, Bessel variance (9 + 1 + 16) / 2 = 13.
    for rank, uncounted in zip(ranks, (1, None), strict=True):
        total, mean, _ = rank["masked"]
        assert total.item() == 12.0 and mean.item() == 4.0
        if uncounted is not None:
            assert rank["masked"][2][uncounted].item() == 0.0
    white = torch.cat([ranks[0]["masked"][2], ranks[1]["masked"][2]])
    torch.testing.assert_close(white, torch.tensor([-3.0, 0.0, -1.0, 4.0]) / 13**0.5)
    kept = torch.cat([ranks[0]["kept mean"], ranks[1]["kept mean"]])
    torch.testing.assert_close(kept, torch.tensor([4 - 3 / 13**0.5, 0.0, 4 - 1 / 13**0.5, 4 + 4 / 13**0.5]))


def test_masked_reductions_of_nothing(ranks):
    for rank, size in zip(ranks, (3, 1), strict=True):
        total, mean, white = rank["empty"]
        assert total.item() == 0.0 and mean.item() == 0.0 and torch.equal(white, torch.zeros(size))
