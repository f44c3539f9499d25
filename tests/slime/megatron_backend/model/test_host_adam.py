"""Tests --optimizer-cpu-offload: Adam with its state on the host equals plain Adam, to the last bit on a CPU."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from megatron_cases import make_config, sequences, train_step

from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model import host_adam, optimizer
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.host_adam import HostAdam, OptimizerFiles, choose_host_weights
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import (
    build_optimizer,
    close_optimizer,
    reload_weights,
    reset_states,
)
from slime.megatron_backend.model.state_files import StateFile

pytestmark = pytest.mark.usefixtures("single_rank")

HOST = {"optimizer_cpu_offload": True}
WAYS = [
    HOST,
    HOST | {"stream_optimizer_state_to_disk": True},
    HOST | {"optimizer_offload_fraction": 0.5},
    HOST | {"optimizer_offload_fraction": 0.0},
]


def trainer(hf_dir, **values):
    if values.get("stream_optimizer_state_to_disk"):
        values.setdefault("offload_train_disk_dir", str(hf_dir / "state"))
    flags = {"lr": 1e-2, "min_lr": 1e-4, "lr_decay_style": "cosine", "weight_decay": 0.1, "clip_grad": 0.5}
    config = make_config(**flags | values)
    model = build_model(load_hf_config(hf_dir), config)
    load_hf(model, hf_dir)
    return model, *build_optimizer(model, config, total_steps=10)


def run(parts, first, last):
    return [train_step(*parts, sequences(step)) for step in range(first, last)]


def weights(parts):
    return {name: tensor.cpu().clone() for name, tensor in export_hf(parts[0])}


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def inner(parts):
    (only,) = parts[1].chained_optimizers
    return only.optimizer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_equal_the_plain_adam(hf_dir, dtype, way):
    plain = trainer(hf_dir, params_dtype=dtype)
    host = trainer(hf_dir, params_dtype=dtype, **way)
    assert isinstance(inner(host), HostAdam)
    if torch.cuda.is_available():  # other kernels: single entries differ by a fraction of the rate
        for (loss, norm), (wanted, wanted_norm) in zip(run(host, 0, 4), run(plain, 0, 4), strict=True):
            assert loss == pytest.approx(wanted, rel=1e-3) and norm == pytest.approx(wanted_norm, rel=1e-2)
    else:
        assert run(host, 0, 4) == run(plain, 0, 4)
        assert_same(weights(host), weights(plain))
    close_optimizer(host[1])


def on_host(host):
    return sum(weight.numel() for part in host._on_host for weight in part._weights)


def test_the_fraction_counts_elements(hf_dir):
    host = inner(trainer(hf_dir, **HOST, optimizer_offload_fraction=0.5))
    total = sum(weight.numel() for weight in host.state)
    assert abs(on_host(host) - 0.5 * total) <= 0.5 * max(weight.numel() for weight in host.state)
    assert on_host(inner(trainer(hf_dir, **HOST))) == total
    assert inner(trainer(hf_dir, **HOST, optimizer_offload_fraction=0.0))._pinned.numel() == 0


@pytest.mark.parametrize(
    ("sizes", "fraction", "wanted"),
    [
        (
            [10, 10, 300, 20, 10],
            0.1,
            [0, 3],
        ),  # 30 elements; 35 are a tenth, and with one more weight it would be 40
        ([300, 10, 10], 0.6, [0]),  # 192 of 320: without the first weight, 172 would be missing
        ([100, 100, 100, 311], 0.7, [0, 3]),  # 411 of 427.7
        ([10, 20, 30], 1.0, [0, 1, 2]),
        ([10, 20, 30], 0.0, []),
    ],
)
def test_a_weight_that_exceeds_the_fraction_by_much_is_left_out(sizes, fraction, wanted):
    weights = [torch.zeros(size) for size in sizes]
    host = choose_host_weights(weights, fraction)
    assert [i for i, weight in enumerate(weights) if any(weight is one for one in host)] == wanted


def test_parts_share_few_buffers(hf_dir, monkeypatch):
    """Each part has one weight, so there are many more parts than buffers. A buffer has the size of the largest
    weight."""
    wanted = trainer(hf_dir, **HOST)
    monkeypatch.setattr(host_adam, "PART_BYTES", 1)
    parts = trainer(hf_dir, **HOST)
    host = inner(parts)
    assert len(host._on_host) == len(host.state) > 2 * host_adam.BUFFERS
    largest = max(weight.numel() for weight in host.state)
    assert host._pinned.numel() == 4 * host_adam.BUFFERS * largest
    got, expected = run(parts, 0, 3), run(wanted, 0, 3)
    if not torch.cuda.is_available():
        assert got == expected
        assert_same(weights(parts), weights(wanted))
    for made in (parts, wanted):
        close_optimizer(made[1])


def test_threads_update_slices_at_the_same_time(hf_dir, monkeypatch):
    """Slices equal whole weights. Each thread computes alone, so that a busy core delays its own slice only."""
    wanted, parts = (trainer(hf_dir, **HOST, params_dtype="bfloat16") for _ in range(2))
    expected = run(wanted, 0, 3)
    monkeypatch.setattr(host_adam, "SLICE", 64)
    inner(parts)._threads, before = 3, torch.get_num_threads()
    together, plain, seen = threading.Barrier(3, timeout=60), host_adam.apply_adamw, set()

    def counted(*args, **kwargs):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait()
        assert torch.get_num_threads() == 1
        plain(*args, **kwargs)

    monkeypatch.setattr(host_adam, "apply_adamw", counted)
    got = run(parts, 0, 1)
    assert len(seen) == 3 and torch.get_num_threads() == before
    monkeypatch.setattr(host_adam, "apply_adamw", plain)
    got += run(parts, 1, 3)
    if not torch.cuda.is_available():
        assert got == expected
        assert_same(weights(parts), weights(wanted))


def test_an_error_of_a_slice_ends_the_step(hf_dir, monkeypatch):
    parts = trainer(hf_dir, **HOST)

    def fail(*args, **kwargs):
        raise MemoryError("a slice")

    monkeypatch.setattr(host_adam, "apply_adamw", fail)
    with pytest.raises(MemoryError, match="a slice"):
        run(parts, 0, 1)


def test_the_state_is_written_by_all_threads(hf_dir, monkeypatch):
    """Linux zeroes the memory of moments and main weights at the first write."""
    seen, zeros = [], torch.zeros_like

    def counted(*args, **kwargs):
        seen.append(torch.get_num_threads())
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros_like", counted)
    before = torch.get_num_threads()
    own = torch.nn.Parameter(torch.ones(5))
    made = HostAdam([{"params": [own]}], fraction=1, threads=before + 1)
    assert seen == [before + 1] * 2 and torch.get_num_threads() == before
    assert torch.equal(made.state[own]["master_param"], torch.ones(5))
    made.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("saves", "loads"),
    [(HOST, HOST), (HOST, {}), ({}, HOST), (WAYS[-2], WAYS[-2]), (WAYS[1], {}), ({}, WAYS[1])],
)
def test_a_run_resumes_from_the_checkpoint_of_either(hf_dir, tmp_path, dtype, saves, loads):
    whole = trainer(hf_dir, params_dtype=dtype)
    expected = run(whole, 0, 5)
    part = trainer(hf_dir, params_dtype=dtype, **saves)
    got = run(part, 0, 3)
    save_checkpoint(tmp_path, 3, *part)
    resumed = trainer(hf_dir, params_dtype=dtype, **loads)
    load_checkpoint(tmp_path, *resumed)
    assert {float(state["step"]) for state in inner(resumed).state.values()} == {3.0}
    got += run(resumed, 3, 5)
    if not torch.cuda.is_available():
        assert got == expected
        assert_same(weights(resumed), weights(whole))
    assert sorted(path.name for path in tmp_path.rglob("common.pt")) == ["common.pt"]
    torch.load(tmp_path / "iter_0000003" / "common.pt", weights_only=True)  # the file has plain values only


def test_main_weights_follow_weights_that_were_loaded_later(hf_dir):
    host = trainer(hf_dir, **HOST, params_dtype="bfloat16")
    with torch.no_grad():
        for parameter in host[0].parameters():
            parameter.mul_(2)
    reload_weights(host[1])
    for weight, state in inner(host).state.items():
        assert torch.equal(state["master_param"], weight.detach().float().cpu())
        assert state["master_param"].device.type == "cpu"


FILES = HOST | {"stream_optimizer_state_to_disk": True}


def test_the_state_is_in_files_of_the_folder(hf_dir, tmp_path):
    """Each state is a mapped file without a name, in parts of --offload-train-disk-chunk-mb."""
    folder = tmp_path / "new" / "nvme"
    parts = trainer(hf_dir, **FILES, offload_train_disk_dir=str(folder))
    run(parts, 0, 1)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert len(maps) == len(inner(parts)._on_host) == 2  # weights with and without decay
    assert {line[1] for line in maps} == {"rw-s"} and not list(folder.iterdir())
    ranges = [tuple(int(word, 16) for word in line[0].split("-")) for line in maps]
    for state in inner(parts).state.values():
        for name in ("master_param", "exp_avg", "exp_avg_sq"):
            assert any(start <= state[name].data_ptr() < end for start, end in ranges)
            assert state[name].dtype == torch.float32
    assert sum(end - start for start, end in ranges) >= 12 * on_host(inner(parts))
    close_optimizer(parts[1])
    del parts, state
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_small_parts_have_files_of_their_own(hf_dir, tmp_path, monkeypatch):
    plain = trainer(hf_dir)
    files = OptimizerFiles(str(tmp_path), 20_000, torch.float32)
    monkeypatch.setattr(optimizer, "_state_files", lambda flags: files)
    host = trainer(hf_dir, **FILES)
    assert len(inner(host)._on_host) > 5
    assert run(host, 0, 3) == run(plain, 0, 3)
    assert_same(weights(host), weights(plain))


def test_moments_in_bfloat16_take_two_bytes(hf_dir, tmp_path):
    """The first update equals that with float32 moments; later updates are close, and a checkpoint fits both."""
    wanted = trainer(hf_dir, params_dtype="bfloat16")
    bf16 = FILES | {"stream_optimizer_state_moment_dtype": "bf16"}
    host = trainer(hf_dir, params_dtype="bfloat16", **bf16)
    assert run(host, 0, 1) == run(wanted, 0, 1)
    assert_same(weights(host), weights(wanted))
    for (loss, norm), (other, other_norm) in zip(run(host, 1, 4), run(wanted, 1, 4), strict=True):
        assert loss == pytest.approx(other, rel=2e-2) and norm == pytest.approx(other_norm, rel=0.1)
    dtypes = {
        name: state[name].dtype
        for state in inner(host).state.values()
        for name in ("exp_avg", "master_param")
    }
    assert dtypes == {"exp_avg": torch.bfloat16, "master_param": torch.float32}
    save_checkpoint(tmp_path, 4, *host)
    again, plain = trainer(hf_dir, params_dtype="bfloat16", **bf16), trainer(hf_dir, params_dtype="bfloat16")
    load_checkpoint(tmp_path, *again)
    load_checkpoint(tmp_path, *plain)
    for one, other, first in zip(
        *(inner(p).state.values() for p in (again, host)), inner(plain).state.values(), strict=True
    ):
        for name in ("exp_avg", "exp_avg_sq", "master_param", "step"):
            assert torch.equal(one[name], other[name]), name
        assert torch.equal(first["exp_avg"].flatten(), one["exp_avg"].float().flatten())
    assert run(again, 4, 6) == run(host, 4, 6)


def test_moments_are_reset_in_files(hf_dir):
    host = trainer(hf_dir, **FILES)
    run(host, 0, 1)
    reset_states(host[1])
    assert not any(state[name].any() for state in inner(host).state.values() for name in ("exp_avg", "step"))
    assert all(state["master_param"].any() for state in inner(host).state.values())


def test_a_full_disk_names_the_flag(tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(
            ValueError, match="--offload-train-disk-dir must have room for the optimizer's state"
        ):
            StateFile(tmp_path, [10**6], torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
