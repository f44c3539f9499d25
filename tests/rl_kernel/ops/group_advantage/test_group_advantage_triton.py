"""Compares `group_advantage` in Triton (in the interpreter without a GPU) with the formula and the reference."""

import math

import pytest
import torch

import rl_kernel.ops.group_advantage as module
from rl_kernel import group_advantage, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.dispatch import Refused
from rl_kernel.mode import using
from rl_kernel.ops.group_advantage.cases import CASES, GroupAdvantageCase, formula

kernels = pytest.importorskip("rl_kernel.ops.group_advantage.kernels", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTRACT = CONTRACTS["group_advantage"]


def triton(*args, **kwargs):
    return group_advantage(*args, impl="triton", **kwargs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_keeps_the_contract(case, siblings, normalize_std, dtype):
    rewards, groups, rollouts = case.inputs(dtype, DEVICE)
    rollouts = rollouts if siblings else None
    got = triton(rewards, groups, rollout_ids=rollouts, normalize_std=normalize_std)
    want = formula(rewards, groups, rollouts, normalize_std=normalize_std)
    bound = CONTRACT.outputs[str(dtype).removeprefix("torch.")].bound(want)
    assert got.dtype == torch.float32 and max_error(got.cpu(), want) <= bound
    reference = group_advantage(
        rewards, groups, rollout_ids=rollouts, normalize_std=normalize_std, impl="reference"
    )
    assert max_error(got, reference) <= bound


@pytest.mark.parametrize("siblings", [False, True])
def test_samples_are_visited_in_several_blocks(monkeypatch, siblings):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    rewards, groups, rollouts = CASES[-1].inputs(device=DEVICE)
    rollouts = rollouts if siblings else None
    want = formula(rewards, groups, rollouts)
    got = triton(rewards, groups, rollout_ids=rollouts)
    assert max_error(got.cpu(), want) <= CONTRACT.outputs["float32"].bound(want)


@pytest.mark.parametrize("value", [0.1, -1.0, 1e6 / 3])
@pytest.mark.parametrize("siblings", [False, True])
def test_equal_rewards_get_exactly_zero(value, siblings):
    rollouts = torch.tensor([0, 1, 0, 2, 3, 3, 3], device=DEVICE) if siblings else None
    rewards = torch.full((7,), value, device=DEVICE)
    out = triton(rewards, torch.zeros(7, device=DEVICE).long(), rollout_ids=rollouts)
    assert out.tolist() == [0.0] * 7


def test_ids_may_be_any_int32_and_strided():
    rewards, groups, rollouts = GroupAdvantageCase("ids", 20, 3).inputs(device=DEVICE)
    want = triton(rewards, groups, rollout_ids=rollouts)
    ids = [(x.int() * 1000 - 7).repeat_interleave(2)[::2] for x in (groups, rollouts)]
    assert torch.equal(triton(rewards.repeat_interleave(2)[::2], ids[0], rollout_ids=ids[1]), want)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_values_are_read_in_strict_mode_and_on_the_host(impl):
    rewards, ids = torch.tensor([1.0, math.nan], device=DEVICE), torch.tensor([3, 0], device=DEVICE)
    rollouts = torch.tensor([9, 9], device=DEVICE)
    with using("strict"), pytest.raises(ValueError, match="rewards must be finite, got nan for sample 1"):
        group_advantage(rewards, ids, impl=impl)
    got = r"rollout_ids must lie in one group each, got rollout 9 in groups \[0, 3\]"
    with using("strict"), pytest.raises(ValueError, match=got):
        group_advantage(torch.zeros_like(rewards), ids, rollout_ids=rollouts, impl=impl)


def test_unread_rewards_spoil_their_own_group_only(monkeypatch):
    monkeypatch.setattr(module, "reads_values", lambda tensor: False)
    rewards = torch.tensor([1.0, math.nan, 0.0, 2.0], device=DEVICE)
    out = triton(rewards, torch.tensor([0, 0, 1, 1], device=DEVICE))
    assert out.isnan().tolist() == [True, True, False, False]
    assert out[2:].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_unread_siblings_in_two_groups_spoil_both_groups(monkeypatch):
    monkeypatch.setattr(module, "reads_values", lambda tensor: False)
    groups = torch.tensor([0, 0, 1, 1, 2, 2], device=DEVICE)
    rollouts = torch.tensor([0, 7, 7, 3, 4, 5], device=DEVICE)
    out = triton(torch.arange(6.0, device=DEVICE), groups, rollout_ids=rollouts)
    assert out.isnan().tolist() == [True] * 4 + [False] * 2


def test_float64_is_refused_by_name():
    with pytest.raises(Refused, match="group_advantage must run .*float64"):
        triton(torch.zeros(2, dtype=torch.float64, device=DEVICE), torch.zeros(2, device=DEVICE).long())


def test_calls_are_counted():
    telemetry(reset=True)
    triton(torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE).long())
    counts = telemetry(reset=True)["group_advantage"]
    assert (counts["calls"], counts["tokens"]) == (1, 3) and counts["implementations"] == {"triton": 1}
