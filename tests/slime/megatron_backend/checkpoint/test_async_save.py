"""Tests --async-save: the files on disk at each time, and those after a kill or an error. A gate holds the thread
back."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import make_config, sequences, train_step
from rank_processes import kill_when_seen, killed, on_ranks

from slime.checkpoints.checkpoint_dir import latest
from slime.checkpoints.checkpoint_files import damage, iterations, read_sums
from slime.megatron_backend.checkpoint.background import BackgroundSaves
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture
def background():
    saves = BackgroundSaves(1)
    yield saves
    saves.close()


def trainer(hf_dir: Path, **config: Any) -> tuple:
    config = make_config(**{"lr": 1e-2, **config})
    model = build_model(load_hf_config(hf_dir), config)
    load_hf(model, hf_dir)
    return model, *build_optimizer(model, config, total_steps=10)


def run(parts: tuple, first: int, last: int) -> list[list[float]]:
    return [train_step(*parts, sequences(step)) for step in range(first, last)]


def weights(parts: tuple) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in export_hf(parts[0])}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_distributed_optimizer": False},
        {"optimizer_cpu_offload": True},
        {"params_dtype": "bfloat16"},
        {"params_dtype": "bfloat16", "use_precision_aware_optimizer": True},
    ],
)
def test_training_goes_on_while_files_are_written(hf_dir, tmp_path, background, config):
    """The checkpoint has the values of its step, and becomes the latest only when it is complete."""
    whole = trainer(hf_dir, **config)
    expected = run(whole, 0, 4)
    parts = trainer(hf_dir, **config)
    got = run(parts, 0, 2)
    save_checkpoint(tmp_path, 1, *parts, extra={"rollout_id": 1})
    gate, moved = threading.Event(), []
    background.start(lambda: gate.wait(60) and None)
    save_checkpoint(
        *(tmp_path, 2, *parts),
        extra={"rollout_id": 2},
        background=background,
        published=lambda: moved.append(latest(tmp_path)),
    )
    assert got + run(parts, 2, 4) == expected  # two more steps change every weight and moment
    assert latest(tmp_path) == 1 and iterations(tmp_path) == [1] and not moved
    assert not list(tmp_path.glob(".iter*/*.distcp"))
    gate.set()
    background.wait()
    assert latest(tmp_path) == 2 and moved == [2] and not list(tmp_path.glob(".iter*"))
    path = tmp_path / "iter_0000002"
    sums = read_sums(path)
    assert sums and damage(path, sums) is None
    resumed = trainer(hf_dir, **config)
    assert load_checkpoint(tmp_path, *resumed) == {"rollout_id": 2}
    assert run(resumed, 2, 4) == expected[2:]
    wanted = weights(whole)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(resumed).items())


def test_the_files_are_those_of_a_plain_save(hf_dir, tmp_path, background):
    parts = trainer(hf_dir)
    run(parts, 0, 1)
    for name, given in (("plain", None), ("later", background)):
        save_checkpoint(tmp_path / name, 1, *parts, background=given)
    background.wait()
    sizes = [
        {file.name: file.stat().st_size for file in (tmp_path / name / "iter_0000001").iterdir()}
        for name in ("plain", "later")
    ]
    assert sizes[0].keys() == sizes[1].keys()
    assert all(sizes[0][name] == sizes[1][name] for name in sizes[0] if name.endswith(".distcp"))


def test_an_error_of_the_thread_is_raised_by_the_next_wait(hf_dir, tmp_path, background):
    """The next save is not written: the checkpoints of two roles appear together or not at all."""
    parts = trainer(hf_dir)
    save_checkpoint(tmp_path, 1, *parts)
    gate = threading.Event()
    background.start(lambda: gate.wait(60) and None)
    save_checkpoint(tmp_path, 2, *parts, background=background)
    save_checkpoint(tmp_path / "other", 2, *parts, background=background)
    shutil.rmtree(partial := tmp_path / ".iter_0000002.partial")
    partial.touch()
    gate.set()
    with pytest.raises(BaseException, match="iter_0000002"):
        background.wait()
    background.close()
    assert latest(tmp_path) == 1 and latest(tmp_path / "other") is None
    partial.unlink()
    save_checkpoint(tmp_path, 2, *parts)
    assert latest(tmp_path) == 2


def save_twice(out: Path, hf_dir: Path, watched: str) -> None:
    """Runs in a child process, which ends in the second save."""
    torch.set_num_threads(1)
    init_parallel(0, 1, make_config(), init_method=f"file://{out}/store")
    parts, background = trainer(hf_dir), BackgroundSaves(1)
    save_checkpoint(out, 1, *parts, extra={"rollout_id": 1}, background=background)
    background.wait()
    kill_when_seen(out, watched)
    save_checkpoint(out, 2, *parts, extra={"rollout_id": 2}, background=background)
    run(parts, 1, 9)
    background.wait()
    time.sleep(10)


@pytest.mark.slow
def test_kill_in_the_middle_leaves_the_checkpoint_before(hf_dir, tmp_path):
    """SIGKILL comes after the copies, at the first tensor file, or when the finished folder is renamed."""
    watched = [".iter_0000002.partial/common.pt", ".iter_0000002.partial/*.distcp", "iter_0000002"]
    folders = [tmp_path / str(i) for i in range(len(watched))]
    for out in folders:
        out.mkdir()
    killed(save_twice, [(out, hf_dir, pattern) for out, pattern in zip(folders, watched, strict=True)])
    for i, out in enumerate(folders):
        found = latest(out)
        assert found == 1 if i < 2 else found in (1, 2)
        parts = trainer(hf_dir)
        assert load_checkpoint(out, *parts) == {"rollout_id": found}
        save_checkpoint(out, 2, *parts)  # files of the killed save do not stop this save
        assert latest(out) == 2 and not list(out.glob(".iter*"))


LAYOUTS: dict[str, dict[str, Any]] = {"dp": {}, "tp": {"tensor_model_parallel_size": 2}}


def work(rank: int, root: Path, hf_dir: Path) -> None:
    for name, layout in LAYOUTS.items():
        config = make_config(**layout)
        info = init_parallel(rank, 2, config, init_method=f"file://{root}/store-{name}", local_rank=rank)
        parts, background = trainer(hf_dir, **layout), BackgroundSaves(1)
        group = {"tp_group": info.tp_group} if info.tp_size > 1 else {}
        train_step(*parts, sequences(0), **group)
        save_checkpoint(root / name, 1, *parts, background=background)
        wanted = weights(parts)
        for step in (1, 2):  # both threads' collectives run at the same time
            train_step(*parts, sequences(step), **group)
        background.wait()
        assert latest(root / name) == 1
        load_checkpoint(root / name, *parts)
        assert all(torch.equal(tensor, wanted[n]) for n, tensor in weights(parts).items())
        background.close()
        destroy_parallel()


def test_two_ranks_save_while_they_train(hf_dir, tmp_path):
    on_ranks(work, tmp_path, hf_dir, ranks=2)
    assert [latest(tmp_path / name) for name in LAYOUTS] == [1, 1]
