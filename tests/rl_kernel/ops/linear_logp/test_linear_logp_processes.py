"""Compares the linear operators' kernels over two gloo processes (in Triton's interpreter) with the whole float64
formula. Shards have any size, one is all padding, rows overflow on one side only, and tokens come in blocks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hardware_rounding import rounding_to_nearest
from rank_processes import on_ranks

from rl_kernel import linear_logp, linear_token_loss, telemetry
from rl_kernel.dispatch import interpreted
from rl_kernel.ops.linear_logp import plan
from rl_kernel.ops.linear_logp.cases import (
    LinearCase,
    compute_truth,
    contract_violations,
    evaluate,
    formula,
    upstream,
)

pytestmark = pytest.mark.skipif(not interpreted(), reason="two GPUs: tests/gpu/test_multi_gpu.py")
BF16, FP32 = torch.bfloat16, torch.float32
SPLITS = {
    # First columns of the ranks' shards, their end, the real vocabulary.
    "uneven": ([0, 152], 260, None),
    "padded": ([0, 136], 272, 250),
    "second shard all padding": ([0, 136], 272, 130),
    "second shard one real column": ([0, 8], 16, 9),
}
TOKENS = 11
KINDS = {"exp head": BF16, "plain head": FP32}
BLOCKS = LinearCase("blocks", 136, 16, 272, vocab_size=250)
"""A case with two blocks of tokens, because the workspace holds 128 rows of a shard."""
UNEVEN = LinearCase("uneven", 136, 16, 1300)
"""A case whose workspace holds all rows of the small shard, and 128 rows of the large shard."""


def problem(split, dtype, wild=False):
    _, end, vocab_size = SPLITS[split]
    hidden, weight, targets = LinearCase(split, TOKENS, 16, end, vocab_size).inputs(dtype, seed=end)
    if wild:
        # The largest logit and the target may be in different shards, up to hundreds of nats from each other.
        hidden[::3] *= 150
    options = {"temperature": torch.linspace(0.5, 2.0, TOKENS), "vocab_size": vocab_size}
    return {"hidden": hidden, "weight": weight}, targets, options


def shard(layer, first, last):
    return layer | {"weight": layer["weight"][first:last]}


def fast(**call):
    return linear_logp(**call, impl="triton", return_entropy=True)


def weighted(log_probs, entropy, rows):
    g, h = (x[rows].to(log_probs.dtype) for x in upstream(1000))
    return (log_probs * g + entropy * h).sum(), {"probs": log_probs.exp()}


def one_pass(layer, targets, buffer=None, **options):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in layer.items()}
    result = linear_token_loss(
        **leaves,
        targets=targets,
        token_loss=weighted,
        return_entropy=True,
        weight_grad=buffer,
        impl="triton",
        **options,
    )
    (2 * result.loss).backward()
    found = {"log_probs": result.log_probs, "entropy": result.entropy, "loss": result.loss.detach()}
    found |= {f"d_{name}": leaf.grad / 2 for name, leaf in leaves.items() if leaf.grad is not None}
    return found | ({} if buffer is None else {"d_weight": buffer})


def one_pass_truth(layer, targets, **options):
    wide = {name: tensor.double().requires_grad_() for name, tensor in layer.items()}
    outputs = formula(**wide, targets=targets, **options)
    loss, _ = weighted(*outputs, slice(0, len(targets)))
    loss.backward()
    found = {"log_probs": outputs[0].detach(), "entropy": outputs[1].detach()}
    return found | {f"d_{name}": leaf.grad for name, leaf in wide.items()}


def on_rank(rank, folder, compared):
    """Computes one process's results and saves them for the parent to compare. `compared` has the calls of
    linear_logp."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    results = {}
    with rounding_to_nearest():
        for split, (starts, end, _) in SPLITS.items():
            first, last = starts[rank], [*starts, end][rank + 1]
            own = {"tp_group": dist.group.WORLD, "vocab_start": first}
            for kind, dtype in KINDS.items():
                layer, targets, options = problem(split, dtype)
                part = shard(layer, first, last)
                for uses in (uses for uses in ("both", "log_probs") if (split, kind, uses) in compared):
                    results[split, kind, uses] = evaluate(fast, part, targets, uses, **options, **own)
                results[split, kind, "one pass"] = one_pass(part, targets, **options, **own)
            layer, targets, options = problem(split, BF16, wild=True)
            part = shard(layer, first, last)
            results[split, "wild"] = evaluate(fast, part, targets, logits_dtype="float32", **options, **own)
        results["blocks"] = gathered(BLOCKS, 136 * rank, 136 * rank + 136, 130 * (64 + 64 + 136 * 2))
        plan.BLOCK_OVERHEAD = 0.0  # several blocks wherever they save a product
        results["uneven blocks"] = gathered(UNEVEN, *[(0, 1104), (1104, 1300)][rank], 136 * (200 + 1060 * 2))
        layer, targets, options = problem("padded", BF16)
        part = shard(layer, 136 * rank, 136 * rank + 136)
        if rank == 1:  # the weight starts at an odd element, as in a flat buffer of parameters
            part["weight"] = torch.cat([torch.zeros(1).bfloat16(), part["weight"].flatten()])[1:].view(
                136, 16
            )
        telemetry(reset=True)
        results["misaligned"] = evaluate(
            fast, part, targets, **options, tp_group=dist.group.WORLD, vocab_start=136 * rank
        )
        results["variants"] = telemetry()["linear_logp"]["variants"]
        empty = {"hidden": torch.zeros(0, 16).bfloat16(), "weight": torch.ones(8 + 8 * rank, 16).bfloat16()}
        own = {"tp_group": dist.group.WORLD, "vocab_start": 8 * rank}
        results["no tokens"] = evaluate(fast, empty, torch.zeros(0).long(), **own)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def gathered(case, first, last, size):
    """Runs a call that adds to an existing gradient, and returns its results with the shapes that it gathered."""
    hidden, weight, targets = case.inputs(BF16)
    layer = {"hidden": hidden, "weight": weight[first:last]}
    buffer = torch.ones(last - first, 16)
    calls, gather = [], dist.all_gather
    dist.all_gather = lambda parts, value, group: (
        calls.append(tuple(value.shape)) or gather(parts, value, group)
    )
    try:
        found = one_pass(
            layer,
            targets,
            buffer,
            vocab_size=case.vocab_size,
            tp_group=dist.group.WORLD,
            vocab_start=first,
            workspace_bytes=size,
        )
    finally:
        dist.all_gather = gather
    found["d_weight"] = found["d_weight"] - 1
    return found | {"gathered": calls}


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """Returns the results of two processes, with the calls of linear_logp that the collected tests compare."""
    folder = tmp_path_factory.mktemp("linear_processes")
    compared = {("padded", "exp head", "both")}
    for item in request.session.items:
        if getattr(item, "originalname", "") == test_linear_logp_keeps_the_contract.__name__:
            compared.add(tuple(item.callspec.params[name] for name in ("split", "kind", "uses")))
    on_ranks(on_rank, str(folder), compared, ranks=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def of_both(ranks, key):
    """Checks that values common to both processes are equal, and joins the results."""
    parts = [rank[key] for rank in ranks]
    for name in parts[0].keys() - {"d_weight", "gathered"}:
        assert torch.equal(parts[0][name], parts[1][name]), f"{name} differs between ranks"
    return parts[0] | {"d_weight": torch.cat([part["d_weight"] for part in parts])}


@pytest.mark.parametrize("uses", ["both", "log_probs"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_linear_logp_keeps_the_contract(ranks, split, kind, uses):
    layer, targets, options = problem(split, KINDS[kind])
    truth = compute_truth(layer, targets, uses, **options)
    assert not contract_violations(of_both(ranks, (split, kind, uses)), truth, KINDS[kind], KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_linear_token_loss_keeps_the_contract(ranks, split, kind):
    layer, targets, options = problem(split, KINDS[kind])
    actual = of_both(ranks, (split, kind, "one pass"))
    truth = one_pass_truth(layer, targets, **options)
    assert not contract_violations(actual, truth, KINDS[kind], KINDS[kind])


@pytest.mark.parametrize("split", SPLITS)
def test_rows_that_overflow_in_one_shard(ranks, split):
    """Each process raises the centers of its own rows and no others."""
    layer, targets, options = problem(split, BF16, wild=True)
    truth = compute_truth(layer, targets, **options)
    assert truth["log_probs"].min() < -100
    assert not contract_violations(of_both(ranks, (split, "wild")), truth, BF16, FP32)


@pytest.mark.parametrize(
    ("key", "case", "rows"), [("blocks", BLOCKS, (128, 8)), ("uneven blocks", UNEVEN, (136,))]
)
def test_blocks_of_tokens_gather_block_by_block(ranks, key, case, rows):
    """With uneven shards, the processes might choose different blocks and wait for each other, so there is
    one block."""
    # The first collective compares the shards, the others each block's statistics.
    shapes = [(2,), *((4, count) for count in rows)]
    assert [rank[key]["gathered"] for rank in ranks] == [shapes] * 2
    hidden, weight, targets = case.inputs(BF16)
    truth = one_pass_truth({"hidden": hidden, "weight": weight}, targets, vocab_size=case.vocab_size)
    assert not contract_violations(of_both(ranks, key), truth, BF16, BF16)


def test_no_tokens(ranks):
    for rank, rows in zip(ranks, (8, 16), strict=True):
        found = rank["no tokens"]
        assert found["log_probs"].shape == (0,) and found["d_hidden"].shape == (0, 16)
        assert torch.equal(found["d_weight"], torch.zeros(rows, 16, dtype=BF16))


def test_memory_of_one_process_does_not_decide_the_form(ranks):
    """The forms differ in their collectives, so processes with different forms would wait for each other."""
    for rank in ranks:
        assert rank["variants"] == {"exponentials": 1}
        for name, value in rank["padded", "exp head", "both"].items():
            assert torch.equal(rank["misaligned"][name], value), name
