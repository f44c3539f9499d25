"""Tests `ratio_kl`, `grpo_loss`, `swiglu`, `rotary`, masked reductions and `group_advantage` on a GPU: accuracy at
millions of tokens, bits that repeat, no synchronisation, CUDA graphs, NCCL."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from rl_kernel import (
    group_advantage,
    grpo_loss,
    masked_mean,
    masked_sum,
    masked_whiten,
    ratio_kl,
    rotary,
    swiglu,
    telemetry,
)
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.mode import using
from rl_kernel.ops.group_advantage import cases as group_cases
from rl_kernel.ops.grpo_loss import cases as grpo_cases
from rl_kernel.ops.masked import cases as masked_cases
from rl_kernel.ops.ratio_kl import cases as ratio_cases
from rl_kernel.ops.rotary import cases as rotary_cases
from rl_kernel.ops.swiglu import cases as swiglu_cases

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASKED = {"masked_sum": masked_sum, "masked_mean": masked_mean, "masked_whiten": masked_whiten}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def wide(columns):
    return {n: v.double() if v.is_floating_point() else v for n, v in columns.items()}


def within(tolerances, dtype, got, want):
    assert got.shape == want.shape
    assert max_error(got, want) <= tolerances[name_of(dtype)].bound(want)


def run_ratio_kl(op, columns, **options):
    columns = dict(columns)
    leaf = columns.pop("log_probs").detach().clone().requires_grad_()
    ratio, kl = op(leaf, *columns.values(), **options)
    return ratio.detach(), kl.detach(), *torch.autograd.grad((ratio + 2 * kl).sum(), leaf)


def run_grpo_loss(op, columns, **options):
    """Returns the loss, the gradients of log_probs and entropy, and the metrics in their order."""
    leaves = {name: columns[name].detach().clone().requires_grad_() for name in ("log_probs", "entropy")}
    loss, metrics = op({**columns, **leaves}, **options)
    needed = list(leaves.values())[: 2 if options.get("entropy_coef") else 1]
    return loss.detach(), *torch.autograd.grad(loss, needed), *metrics.values()


def grpo(columns, **options):
    return grpo_loss(**columns, **options)


def run_masked(op, values, mask, **options):
    leaf = values.detach().clone().requires_grad_()
    out = op(leaf, mask, **options)
    weight = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(5), device="cuda")
    return out.detach(), *torch.autograd.grad((out * weight).sum(), leaf)


@pytest.mark.parametrize("case", ratio_cases.CASES + ratio_cases.LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("options", ratio_cases.OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ratio_kl_keeps_the_contract(case, options, dtype):
    columns, contract = case.inputs(dtype, "cuda"), CONTRACTS["ratio_kl"]
    got = run_ratio_kl(ratio_kl, columns, **options)
    want = run_ratio_kl(ratio_cases.formula, wide(columns), **options)
    for ours, truth in zip(got[:2], want[:2], strict=True):
        within(contract.outputs, dtype, ours, truth)
    within(contract.gradients, dtype, got[2], want[2])


@pytest.mark.parametrize("case", grpo_cases.CASES + grpo_cases.LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("options", grpo_cases.OPTIONS.values(), ids=grpo_cases.OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grpo_loss_keeps_the_contract(case, options, dtype):
    columns, contract = case.inputs(dtype, "cuda"), CONTRACTS["grpo_loss"]
    got = run_grpo_loss(grpo, columns, **options)
    want = run_grpo_loss(grpo_cases.formula, wide(columns), **options)
    grads = 2 if options.get("entropy_coef") else 1
    for i, (ours, truth) in enumerate(zip(got, want, strict=True)):
        within(contract.gradients if 1 <= i <= grads else contract.outputs, dtype, ours, truth)


def run_layer(op, x, upstream):
    """Returns output and input gradient; the leaf keeps the strides of x."""
    leaf = x.detach().requires_grad_()
    out = op(leaf)
    return out.detach(), *torch.autograd.grad(out, leaf, upstream)


@pytest.mark.parametrize("case", swiglu_cases.CASES + swiglu_cases.LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_keeps_the_contract(case, dtype):
    x, upstream = case.inputs(dtype, "cuda")
    want = run_layer(swiglu_cases.formula, x.double(), upstream.double())
    for impl in ("triton", "reference"):
        got = run_layer(lambda x, impl=impl: swiglu(x, impl=impl), x, upstream)
        within(CONTRACTS["swiglu"].outputs, dtype, got[0], want[0])
        within(CONTRACTS["swiglu"].gradients, dtype, got[1], want[1])


@pytest.mark.parametrize("case", rotary_cases.CASES + rotary_cases.LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_keeps_the_contract(case, dtype):
    """Query and key may also be views of a fused row."""
    x, cos, sin, upstream = case.inputs(dtype, "cuda")
    truth = run_layer(lambda x: rotary_cases.formula(x, cos, sin, dtype), x.double(), upstream.double())
    for impl in ("triton", "reference"):
        got = run_layer(lambda x, impl=impl: rotary(x, cos, sin, impl=impl), x, upstream)
        within(CONTRACTS["rotary"].outputs, dtype, got[0], truth[0])
        within(CONTRACTS["rotary"].gradients, dtype, got[1], truth[1])


def test_gates_of_every_size():
    """Some gates lie where 1 - sigmoid(gate) runs out of digits. The gradient's float32 tolerance allows for this."""
    gate = torch.linspace(-30, 30, 2**20, device="cuda")[None]
    x, upstream = torch.cat((gate, torch.ones_like(gate)), 1), torch.ones_like(gate)
    got, want = run_layer(swiglu, x, upstream), run_layer(swiglu_cases.formula, x.double(), upstream.double())
    within(CONTRACTS["swiglu"].gradients, torch.float32, got[1][:, : 2**20], want[1][:, : 2**20])


@pytest.mark.parametrize("case", masked_cases.CASES + masked_cases.LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_reductions_keep_the_contract(case, name, dtype):
    values, mask = case.inputs(dtype, "cuda")
    got = run_masked(MASKED[name], values, mask)
    want = run_masked(lambda v, m: masked_cases.formula(name, v, m), values.double(), mask)
    within(CONTRACTS[name].outputs, dtype, got[0], want[0])
    within(CONTRACTS[name].gradients, dtype, got[1], want[1])


@pytest.mark.parametrize("case", group_cases.CASES + group_cases.LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize("normalize_std", [False, True])
def test_group_advantage_keeps_the_contract(case, siblings, normalize_std):
    rewards, groups, rollouts = case.inputs(device="cuda")
    rollouts = rollouts if siblings else None
    got = group_advantage(rewards, groups, rollout_ids=rollouts, normalize_std=normalize_std)
    want = group_cases.formula(rewards, groups, rollouts, normalize_std=normalize_std)
    within(CONTRACTS["group_advantage"].outputs, torch.float32, got.cpu(), want)


def test_equal_rewards_get_exactly_zero():
    ids = torch.arange(3000, device="cuda") % 7
    assert not group_advantage(torch.full((3000,), 0.1, device="cuda"), ids).any()


def calls():
    """Returns name -> a call with its backward that makes all its tensors, for 300000 tokens or 3000 samples."""
    ratio = ratio_cases.RatioKlCase("calls", 300_000).inputs(torch.bfloat16, "cuda")
    loss = grpo_cases.GrpoLossCase("calls", 300_000).inputs(torch.bfloat16, "cuda")
    tile = grpo_cases.GrpoLossCase("tile", 2000).inputs(torch.float32, "cuda") | {"denominators": 50.0}
    values, mask = masked_cases.MaskedCase("calls", (300_000,)).inputs(device="cuda")
    rewards, groups, rollouts = group_cases.GroupAdvantageCase("calls", 3000, 100).inputs(device="cuda")
    every = grpo_cases.OPTIONS["everything"]
    x, d_x = swiglu_cases.SwigluCase("calls", (300,), 3001).inputs(torch.bfloat16, "cuda")
    query, cos, sin, d_query = rotary_cases.RotaryCase("calls", 3001, 7, 96, extra=64).inputs(
        torch.bfloat16, "cuda"
    )
    table = {
        "swiglu": lambda: run_layer(swiglu, x, d_x),
        "rotary": lambda: run_layer(lambda x: rotary(x, cos, sin), query, d_query),
        "ratio_kl": lambda: run_ratio_kl(ratio_kl, ratio, kl_type="k3", unbiased=True),
        "grpo_loss": lambda: run_grpo_loss(grpo, loss, **every),
        "grpo_loss tile": lambda: run_grpo_loss(grpo, tile, **every),
        "group_advantage": lambda: (group_advantage(rewards, groups, rollout_ids=rollouts),),
    }
    for name, op in MASKED.items():
        table[name] = lambda op=op: run_masked(op, values, mask)
    return table


CALLS = ("swiglu", "rotary", "ratio_kl", "grpo_loss", "grpo_loss tile", "group_advantage", *MASKED)


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_repeats_are_bitwise_equal_and_wait_for_nothing(name):
    call = calls()[name]
    first = call()
    with no_synchronisation():
        again = call()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("masked")])
def test_calls_can_be_captured_in_a_graph(name):
    check_capture(calls()[name])


@pytest.mark.parametrize("op", MASKED.values(), ids=MASKED)
def test_masked_reductions_can_be_captured_in_a_graph(op):
    values, mask = masked_cases.MaskedCase("graph", (300_000,)).inputs(device="cuda")
    leaf = values.requires_grad_()
    weight = torch.randn_like(values)

    def call():
        out = op(leaf, mask)
        return out.detach(), *torch.autograd.grad((out * weight).sum(), leaf)

    check_capture(call)


def check_capture(call):
    want = [x.clone() for x in call()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for x in got:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_graph_reads_new_values():
    columns = grpo_cases.GrpoLossCase("graph", 5000).inputs(device="cuda")
    columns["log_probs"].requires_grad_()
    with torch.no_grad():
        grpo(columns)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        loss, _ = grpo(columns)
    columns["advantages"].mul_(2)
    graph.replay()
    assert torch.equal(loss, grpo(columns)[0])


def test_launches():
    """A tile of a few thousand tokens launches one kernel forward and one backward; long columns launch two and one."""
    for tokens, most in ((4096, 2), (100_000, 3)):
        columns = grpo_cases.GrpoLossCase("launches", tokens).inputs(device="cuda")
        leaf = columns["log_probs"].requires_grad_()
        upstream = torch.ones((), device="cuda")
        torch.autograd.grad(grpo(columns)[0], leaf, upstream)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            torch.autograd.grad(grpo(columns)[0], leaf, upstream)
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
        assert 0 < len(kernels) <= most, kernels


def test_strict_mode_reads_values_and_fast_mode_shows_nan():
    columns = grpo_cases.GrpoLossCase("strict", 100).inputs(device="cuda")
    columns["mask"][3] = True
    columns = {n: torch.nan_to_num(v) if v.is_floating_point() else v for n, v in columns.items()}
    columns["denominators"][3] = 0
    with using("strict"), pytest.raises(ValueError, match="denominators must be > 0 .* got 0.0 for token 3"):
        grpo(columns)
    assert grpo(columns)[0].isnan()
    assert grpo(columns, impl="reference")[0].isnan()


def test_fallbacks_are_counted_with_their_reason():
    telemetry(reset=True)
    ratio_kl(*torch.zeros(2, 4, device="cuda", dtype=torch.float64))
    counts = telemetry(reset=True)["ratio_kl"]
    assert counts["fallbacks"] == {"float64 inputs are computed by the reference only": 1}


def test_masked_reductions_over_nccl_wait_for_nothing(tmp_path):
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/init",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )
    try:
        values, mask = masked_cases.MaskedCase("nccl", (5000,)).inputs(device="cuda")
        for name, op in MASKED.items():
            want = op(values, mask)
            op(values, mask, group=dist.group.WORLD)
            with no_synchronisation():
                got = op(values, mask, group=dist.group.WORLD)
            within(CONTRACTS[name].outputs, torch.float32, got, want.double())
    finally:
        dist.destroy_process_group()
