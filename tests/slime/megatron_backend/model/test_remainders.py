"""Tests --use-precision-aware-optimizer: main weights that are remainders of 16 bits."""

from __future__ import annotations

import pytest
import torch
from megatron_cases import sequences, tiny_checkpoint, train_step
from test_host_adam import inner, run, trainer, weights
from torch.utils._python_dispatch import TorchDispatchMode

from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.model import remainders
from slime.megatron_backend.model.gpt import unwrap
from slime.megatron_backend.model.host_adam import HostAdam
from slime.megatron_backend.model.optimizer import reload_weights, reset_states
from slime.megatron_backend.model.remainders import group_by_size, join, join_weights, split, split_weights
from slime.megatron_backend.storages import iter_states

pytestmark = pytest.mark.usefixtures("single_rank")
FLAG = {"use_precision_aware_optimizer": True, "params_dtype": "bfloat16"}
PLAIN = {"params_dtype": "bfloat16"}


def bits(tensor):
    return tensor.view(torch.int32)


def assert_close(steps, wanted):
    for step, other in zip(steps, wanted, strict=True):
        assert step == pytest.approx(other, rel=1e-4)


def mains(parts):
    optimizer = inner(parts)
    if isinstance(optimizer, HostAdam):
        return [optimizer.get_unscaled_state(weight, "master_param") for weight in optimizer.state]
    return [weight.detach() for weight in optimizer.state]


def all_mains(parts):
    return torch.cat([main.cpu().flatten() for main in mains(parts)])


def test_only_main_weights_between_two_numbers_lose_a_bit(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31 - 1, (2**18,), generator=generator).int().view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, float("inf")])
    upper = torch.cat([torch.arange(200), torch.arange(200) - 2**15])  # of both parities and signs
    ties = (upper.int() << 16) + 2**15
    values = torch.cat([values[torch.isfinite(values)], edges, ties.view(torch.float32)])
    weight, rest = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values.clone(), weight, rest)
    assert torch.equal(weight.view(torch.int16), values.bfloat16().view(torch.int16))
    lost = (bits(values) & 0xFFFF == 2**15) & (bits(values) >> 16 & 1 == 0)
    assert lost.sum() > 100
    assert torch.equal(bits(join(weight, rest)), bits(values) - lost.int())
    monkeypatch.setattr(remainders, "DEVICE_SLICE", 1000)
    again, other = torch.empty_like(weight), torch.empty_like(rest)
    split_weights(values, again, other)
    assert torch.equal(again, weight) and torch.equal(other, rest)
    assert torch.equal(bits(join_weights(again, other)), bits(join(weight, rest)))


@pytest.mark.parametrize("slice_size", [2**26, 512])
def test_steps_equal_the_plain_adam(hf_dir, monkeypatch, slice_size):
    joined, plain_join = list[int](), remainders.join
    monkeypatch.setattr(remainders, "DEVICE_SLICE", slice_size)
    monkeypatch.setattr(remainders, "join", lambda *pair: joined.append(pair[0].numel()) or plain_join(*pair))
    plain, small = trainer(hf_dir, **PLAIN), trainer(hf_dir, **FLAG)
    assert {state["master_param"].dtype for state in inner(small).state.values()} == {torch.int16}
    for step in range(4):
        assert_close(run(small, step, step + 1), run(plain, step, step + 1))
    for one, other in zip(mains(small), mains(plain), strict=True):
        off = (bits(one.flatten()) - bits(other.flatten())).abs()
        assert (off > 1).float().mean() < 1e-4 and (off > 0).float().mean() < 1e-3
    assert 0 < max(joined) <= slice_size


class Operations(TorchDispatchMode):
    """Counts the operations that are not views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_number_of_weights():
    """Each expert of a layer has its own weights."""
    counts = []
    for number in (2, 500):
        weights = [torch.randn(3, 5).bfloat16() for _ in range(number)]
        for weight in weights:
            weight.decoupled_grad = torch.randn(3, 5)
        group = {"params": weights, "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        optimizer = HostAdam([group], fraction=0, threads=1, remainders=True)
        before = [weight.clone() for weight in weights]
        with Operations() as operations:
            optimizer.step()
        counts.append(operations.count)
        assert not any(torch.equal(*pair) for pair in zip(weights, before, strict=True))
    assert counts[0] == counts[1] < 40


def test_the_state_has_ten_bytes_per_weight(hf_dir):
    parts = trainer(hf_dir, **FLAG)
    optimizer = inner(parts)
    params = sum(weight.numel() for weight in optimizer.state)
    states = sum(each.nbytes for each in iter_states(parts[1])) - 2 * params  # it also yields the weights
    assert states == 10 * params


def test_other_optimizers_ignore_the_flag(hf_dir):
    exact = trainer(hf_dir, use_precision_aware_optimizer=True, params_dtype="float32")
    assert not isinstance(inner(exact), HostAdam)
    host = inner(trainer(hf_dir, **FLAG, optimizer_cpu_offload=True))
    assert {state["master_param"].dtype for state in host.state.values()} == {torch.float32}
    half = inner(trainer(hf_dir, **FLAG, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5))
    assert {state["master_param"].dtype for state in half.state.values()} == {torch.float32, torch.int16}


@pytest.mark.parametrize(("saves", "loads"), [(FLAG, FLAG), (FLAG, PLAIN), (PLAIN, FLAG)])
def test_a_run_resumes_from_the_checkpoint_of_either(hf_dir, tmp_path, saves, loads):
    part = trainer(hf_dir, **saves)
    run(part, 0, 3)
    save_checkpoint(tmp_path, 3, *part)
    expected = run(part, 3, 5)
    resumed = trainer(hf_dir, **loads)
    load_checkpoint(tmp_path, *resumed)
    assert {float(state["step"]) for state in inner(resumed).state.values()} == {3.0}
    got = run(resumed, 3, 5)
    if saves is loads:
        assert got == expected
        assert all(torch.equal(value, weights(part)[name]) for name, value in weights(resumed).items())
    else:
        assert_close(got, expected)


def test_main_weights_follow_weights_that_were_loaded_later(hf_dir):
    parts = trainer(hf_dir, **FLAG)
    run(parts, 0, 1)
    with torch.no_grad():
        for parameter in parts[0].parameters():
            parameter.mul_(2)
    reload_weights(parts[1])
    for weight, main in zip(inner(parts).state, mains(parts), strict=True):
        assert torch.equal(main, weight.detach().float())
    reset_states(parts[1])
    assert not any(state[name].any() for state in inner(parts).state.values() for name in ("exp_avg", "step"))


@pytest.mark.parametrize(
    ("kind", "dtypes"), [("qwen3_moe", {torch.int16}), ("qwen3_next", {torch.int16, torch.float32})]
)
def test_experts_and_float32_weights(tmp_path, kind, dtypes):
    """A bfloat16 Qwen3-Next has float32 weights (`A_log`), which are their own main weights."""
    tiny_checkpoint(tmp_path, kind)
    plain, small = trainer(tmp_path, **PLAIN), trainer(tmp_path, **FLAG)
    found = [state["master_param"].dtype for state in inner(small).state.values()]
    assert set(found) == dtypes and found.count(torch.int16) > len(found) // 2
    assert_close(run(small, 0, 3), run(plain, 0, 3))
    pairs = list(zip(weights(small).items(), weights(plain).values(), strict=True))
    different = sum(int((one != other).sum()) for (_, one), other in pairs)
    assert different < 1e-3 * sum(other.numel() for _, other in pairs)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_gradients_can_be_summed_in_bfloat16(tmp_path, kind):
    """With --grad-reduce-in-bf16, the main weights of three steps differ by less than a tenth of their movement from
    those with sums in float32. One half of Adam is on the host, and a step has four micro-batches."""
    tiny_checkpoint(tmp_path, kind)
    half = {**FLAG, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    exact, rounded = (
        trainer(tmp_path, **half),
        trainer(tmp_path, **half, overrides={"grad_reduce_in_fp32": False}),
    )
    for parts, dtype in ((exact, torch.float32), (rounded, torch.bfloat16)):
        assert {weight.main_grad.dtype for weight in unwrap(parts[0]).parameters()} == {dtype}
        found = {state["master_param"].dtype for state in inner(parts).state.values()}
        assert found == {torch.float32, torch.int16}
    start = all_mains(exact)
    assert torch.equal(start, all_mains(rounded))
    for step in range(3):
        wanted = train_step(*exact, sequences(step), micro_batches=4)
        assert train_step(*rounded, sequences(step), micro_batches=4) == pytest.approx(wanted, rel=0.01)
    moved, different = all_mains(exact) - start, all_mains(rounded) - all_mains(exact)
    assert 0 < different.norm() < 0.1 * moved.norm()


def test_groups_have_at_most_the_elements():
    assert group_by_size([3, 4, 3, 20, 1, 9, 1], int, 10) == [[3, 4, 3], [20], [1, 9], [1]]
    assert group_by_size([], int, 10) == [] and group_by_size([1, 1], int, 0) == [[1], [1]]
