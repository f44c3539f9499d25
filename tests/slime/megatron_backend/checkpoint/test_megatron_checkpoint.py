"""Tests checkpoints: exact continuation, kills in the middle of a save, and errors."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_cases import make_config, sequences, tiny_checkpoint, train_step
from rank_processes import kill_when_seen, killed

from slime.checkpoints.checkpoint_dir import latest
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import init_parallel

pytestmark = pytest.mark.usefixtures("single_rank")


def trainer(hf_dir, **config):
    values = {"lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine", "lr_warmup_iters": 2, **config}
    config = make_config(**values)
    model = build_model(load_hf_config(hf_dir), config)
    load_hf(model, hf_dir)
    return model, *build_optimizer(model, config, total_steps=10)


def run(parts, first, last):
    return [
        [*train_step(*parts, sequences(step)), random.random(), torch.rand(1).item()]
        for step in range(first, last)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_resumed_run_is_bitwise_the_uninterrupted_one(hf_dir, tmp_path, dtype, distributed):
    """Losses, gradient norms and random numbers of steps 3-5 are equal, and so are the final weights."""
    config = {"params_dtype": dtype, "use_distributed_optimizer": distributed}
    random.seed(0), torch.manual_seed(0)
    whole = trainer(hf_dir, **config)
    expected = run(whole, 0, 6)
    random.seed(0), torch.manual_seed(0)
    part = trainer(hf_dir, **config)
    got = run(part, 0, 3)
    save_checkpoint(tmp_path, 3, *part, extra={"rollout_id": 2, "names": ["a"]})
    random.seed(99), torch.manual_seed(99), np.random.seed(99)
    resumed = trainer(hf_dir, **config)
    assert load_checkpoint(tmp_path, *resumed) == {"rollout_id": 2, "names": ["a"]}
    assert got + run(resumed, 3, 6) == expected
    for (name, a), (_, b) in zip(export_hf(whole[0]), export_hf(resumed[0]), strict=True):
        assert torch.equal(a, b), name
    assert resumed[1].param_groups[0]["lr"] == whole[1].param_groups[0]["lr"]


def test_layout_and_latest(hf_dir, tmp_path):
    assert latest(tmp_path) is None
    parts = trainer(hf_dir)
    assert save_checkpoint(tmp_path, 10, *parts) == tmp_path / "iter_0000010"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    save_checkpoint(tmp_path, 20, *parts)
    save_checkpoint(tmp_path, 20, *parts)  # a second save replaces the first
    assert latest(tmp_path) == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000010",
        "iter_0000020",
        "latest_checkpointed_iteration.txt",
    ]


def test_an_older_iteration_can_be_asked_for(hf_dir, tmp_path):
    parts = trainer(hf_dir)
    for iteration in (1, 2):
        run(parts, iteration, iteration + 1)
        save_checkpoint(tmp_path, iteration, *parts, extra={"at": iteration})
    assert load_checkpoint(tmp_path, *parts, iteration=1) == {"at": 1}
    assert load_checkpoint(tmp_path, *parts) == {"at": 2}
    with pytest.raises(ValueError, match="iteration 7 must be a complete checkpoint"):
        load_checkpoint(tmp_path, *parts, iteration=7)


def test_without_optimizer_state_moments_start_afresh(hf_dir, tmp_path, caplog):
    model, optimizer, scheduler = trainer(hf_dir)
    run((model, optimizer, scheduler), 0, 2)
    with_optimizer = save_checkpoint(tmp_path, 1, model, optimizer, scheduler)
    without = save_checkpoint(tmp_path, 2, model, None, scheduler)
    size = {path: sum(f.stat().st_size for f in path.iterdir()) for path in (with_optimizer, without)}
    assert size[without] < 0.4 * size[with_optimizer]  # one tensor per parameter instead of four
    resumed = trainer(hf_dir)
    load_checkpoint(tmp_path, *resumed)
    assert "holds no optimizer" in caplog.text
    (only,) = resumed[1].chained_optimizers
    assert {float(s["step"]) for s in only.optimizer.state.values()} == {0.0}
    for (name, a), (_, b) in zip(export_hf(model), export_hf(resumed[0]), strict=True):
        assert torch.equal(a, b), name
    run(resumed, 2, 3)  # a step starts from the loaded weights, because the main weights were refreshed
    for (name, a), (_, b) in zip(export_hf(model), export_hf(resumed[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3, msg=name)


def test_flags_given_now_win_over_the_checkpoint(hf_dir, tmp_path):
    parts = trainer(hf_dir)
    run(parts, 0, 3)
    save_checkpoint(tmp_path, 3, *parts)
    changed = trainer(hf_dir, lr=5e-4, lr_decay_style="constant", adam_beta2=0.9)
    load_checkpoint(tmp_path, *changed)
    assert {group["lr"] for group in changed[1].param_groups} == {5e-4}
    assert {group["betas"] for group in changed[1].param_groups} == {(0.9, 0.9)}
    assert changed[2].num_steps == 3 * 8
    (only,) = changed[1].chained_optimizers
    assert {float(s["step"]) for s in only.optimizer.state.values()} == {3.0}


def test_a_frozen_model_loads_from_a_training_checkpoint(hf_dir, tmp_path):
    parts = trainer(hf_dir)
    run(parts, 0, 2)
    save_checkpoint(tmp_path, 2, *parts)
    reference = build_model(load_hf_config(hf_dir), make_config(), ddp=False)
    load_checkpoint(tmp_path, reference)
    for (name, a), (_, b) in zip(export_hf(parts[0]), export_hf(reference), strict=True):
        assert torch.equal(a, b), name


def test_wrong_model_and_broken_directories_are_refused(hf_dir, tmp_path):
    save_checkpoint(tmp_path, 1, *trainer(hf_dir))
    tiny_checkpoint(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(
        ValueError, match="num_hidden_layers of the checkpoint must be 3 as in --hf-checkpoint, got 2"
    ):
        load_checkpoint(tmp_path, *trainer(tmp_path / "other"))
    with pytest.raises(ValueError, match="--load must hold latest_checkpointed_iteration.txt"):
        load_checkpoint(tmp_path / "nowhere", *trainer(hf_dir))
    record = tmp_path / "latest_checkpointed_iteration.txt"
    record.write_text("5")
    with pytest.raises(ValueError, match=r"must name a complete checkpoint, got 5 but .*iter_0000005"):
        latest(tmp_path)
    record.write_text("newest")
    with pytest.raises(ValueError, match="must hold an iteration number or 'release', got 'newest'"):
        latest(tmp_path)


@pytest.mark.slow
def test_cut_off_between_two_renames_still_loads(hf_dir, tmp_path):
    """A second save of an iteration moves the first one aside before it renames the new folder."""
    parts = trainer(hf_dir)
    path = save_checkpoint(tmp_path, 4, *parts, extra={"first": True})
    path.rename(tmp_path / ".iter_0000004.old")
    assert latest(tmp_path) == 4
    assert load_checkpoint(tmp_path, *parts) == {"first": True}
    save_checkpoint(tmp_path, 4, *parts, extra={"first": False})
    assert load_checkpoint(tmp_path, *parts) == {"first": False}


def save_twice(out: Path, hf_dir: Path, watched: str) -> None:
    """Runs in a child process, which ends in the second save."""
    torch.set_num_threads(1)
    init_parallel(0, 1, make_config(), init_method=f"file://{out}/store")
    parts = trainer(hf_dir)
    save_checkpoint(out, 1, *parts, extra={"rollout_id": 1})
    kill_when_seen(out, watched)
    save_checkpoint(out, 2, *parts, extra={"rollout_id": 2})
    time.sleep(10)


def test_kill_during_a_save_leaves_a_latest_that_loads(hf_dir, tmp_path):
    """SIGKILL comes at the first tensor file, or when the finished directory is renamed."""
    watched = [".iter_0000002.partial/*.distcp", "iter_0000002"]
    folders = [tmp_path / str(i) for i in range(len(watched))]
    for out in folders:
        out.mkdir()
    killed(save_twice, [(out, hf_dir, pattern) for out, pattern in zip(folders, watched, strict=True)])
    for i, out in enumerate(folders):
        parts = trainer(hf_dir)
        found = latest(out)
        assert found == 1 if i == 0 else found in (1, 2)
        assert load_checkpoint(out, *parts) == {"rollout_id": found}
        save_checkpoint(out, 2, *parts)  # files of the killed save do not stop this save
        assert latest(out) == 2 and not list(out.glob(".iter*"))
