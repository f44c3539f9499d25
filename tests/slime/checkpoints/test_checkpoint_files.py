"""Errors for damaged checkpoints name the fault, the file, and the newest older iteration that is intact."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from config_cases import good_argv
from megatron_cases import make_config, sequences, tiny_checkpoint, train_step
from rank_processes import on_ranks

from slime.checkpoints.checkpoint_files import CHECKSUMS, SummedFile, read_sums, sum_file
from slime.megatron_backend.checkpoint.checkpoint_io import verify
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.rules import parse_args
from vime.cli import main

TENSORS = "__0_0.distcp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves three iterations of a trained model, and returns the parts to load them into."""
    root = tmp_path_factory.mktemp("saved")
    tiny_checkpoint(root / "hf")
    config = make_config(lr=1e-3)
    init_parallel(0, 1, config, init_method=f"file://{root}/store")
    model = build_model(load_hf_config(root / "hf"), config)
    parts = model, *build_optimizer(model, config, total_steps=10)
    for iteration in (1, 2, 3):
        train_step(*parts, sequences(iteration))
        save_checkpoint(root / "folder", iteration, *parts, extra={"at": iteration})
    yield root / "folder", parts
    destroy_parallel()


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "folder"))


def flip(file: Path, count: int = 4096) -> None:
    """Inverts `count` bytes in the middle, so that the size stays."""
    content = bytearray(file.read_bytes())
    start = max(0, len(content) // 2 - count // 2)
    content[start : start + count] = bytes(255 - b for b in content[start : start + count])
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def refused(folder: Path, parts, iteration: int | None = None) -> str:
    with pytest.raises(ValueError) as error:
        load_checkpoint(folder, *parts, iteration=iteration)
    text = str(error.value)
    assert "\n" not in text, text
    return text


def test_each_file_has_its_checksum_as_it_was_written(saved):
    folder, _ = saved
    for path in folder.glob("iter_*"):
        sums = read_sums(path)
        assert set(sums) == {".metadata", "common.pt", "metadata.json", TENSORS}
        assert sums == {name: sum_file(path / name) for name in sums}


def test_a_summed_file_counts_what_the_kernel_took(tmp_path):
    with SummedFile(tmp_path / "file") as file:
        for part in (b"abc", bytes(5_000_000), memoryview(bytearray(b"defg"))):
            file.write(part)
    assert file.sum == sum_file(tmp_path / "file")
    assert sum_file(tmp_path / "file").bytes == 5_000_007


@pytest.mark.parametrize("name", [TENSORS, "common.pt", ".metadata", "metadata.json"])
@pytest.mark.parametrize("fault", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
def test_a_damaged_file_is_named_with_the_iteration_to_take(saved, folder, name, fault):
    fault(folder / "iter_0000003" / name)
    if name == "metadata.json" and fault is Path.unlink:
        assert "iteration 3 must be a complete checkpoint" in refused(folder, saved[1], 3)
        return
    text = refused(folder, saved[1])
    rule = {flip: "the checksum", cut: "bytes", Path.unlink: "be there"}[fault]
    assert text.startswith(f"{folder}/iter_0000003/{name} must ") and rule in text, text
    assert text.endswith("; the newest older iteration 2 is whole: take it with --ckpt-step 2")
    assert load_checkpoint(folder, *saved[1], iteration=2) == {"at": 2}


def test_an_older_iteration_that_is_damaged_too_is_not_advised(saved, folder):
    flip(folder / "iter_0000003" / TENSORS)
    flip(folder / "iter_0000002" / TENSORS)
    assert "the newest older iteration 1 is whole: take it with --ckpt-step 1" in refused(folder, saved[1])
    (folder / "iter_0000001" / CHECKSUMS).write_text("{")
    assert f"; no older iteration in {folder} is whole: restore the file" in refused(folder, saved[1])
    text = refused(folder, saved[1], 1)
    assert text.startswith(
        f"{folder}/iter_0000001/{CHECKSUMS} must hold the checksums that --save wrote, got "
    )


@pytest.mark.parametrize("name", [TENSORS, "common.pt", ".metadata"])
@pytest.mark.parametrize("fault", [cut, Path.unlink], ids=["cut", "missing"])
def test_damage_without_checksums_is_named_when_it_is_read(saved, folder, name, fault):
    for path in folder.glob("iter_*"):
        (path / CHECKSUMS).unlink()
    fault(folder / "iter_0000003" / name)
    text = refused(folder, saved[1])
    assert text.startswith(f"{folder}/iter_0000003/{name} must ")
    assert text.endswith("iteration 2 has no checksums, but may be whole: take it with --ckpt-step 2")


def test_checkpoints_of_earlier_versions_load_with_a_line(saved, folder, caplog):
    (folder / "iter_0000003" / CHECKSUMS).unlink()
    assert load_checkpoint(folder, *saved[1]) == {"at": 3}
    assert "iter_0000003 has no checksums: an earlier version saved it" in caplog.text


def verify_on_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with pytest.raises(ValueError) as error:
        verify(folder, 3, "--ckpt-step {}")
    (folder / f"rank{rank}.txt").write_text(str(error.value))
    dist.destroy_process_group()


def test_all_ranks_get_the_error_of_the_rank_that_read_the_file(folder):
    flip(folder / "iter_0000003" / "common.pt")
    on_ranks(verify_on_rank, folder, ranks=2)
    first, second = ((folder / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert first == second and f"{folder}/iter_0000003/common.pt must have the checksum" in first
    assert first.endswith("2 is whole: take it with --ckpt-step 2")


def test_flags_refuse_what_sizes_show_and_take_a_step(folder, tmp_path):
    argv = [*good_argv(tmp_path), "--load", str(folder)]
    parse_args(argv)
    flip(folder / "iter_0000003" / TENSORS)
    parse_args(argv)  # only the trainer reads the content
    cut(folder / "iter_0000003" / TENSORS)
    with pytest.raises(ValueError, match=rf"iter_0000003/{TENSORS} must have \d+ bytes .*--ckpt-step 2$"):
        parse_args(argv)
    assert parse_args([*argv, "--ckpt-step", "2"]).checkpoint.ckpt_step == 2
    (folder / "iter_0000003" / "metadata.json").unlink()
    with pytest.raises(ValueError, match=r"--load must hold .* is not one; .* 2 is whole: .*--ckpt-step 2$"):
        parse_args(argv)
    assert parse_args([*argv, "--ckpt-step", "2"]).checkpoint.ckpt_step == 2
    with pytest.raises(ValueError, match=r"--ckpt-step must name an iteration in .*, got 7; it has 1, 2$"):
        parse_args([*argv, "--ckpt-step", "7"])
    with pytest.raises(ValueError, match=r"--load must be given with --ckpt-step, got only --ckpt-step 2"):
        parse_args([*argv[:-2], "--ckpt-step", "2"])


def test_verify_command(folder, tmp_path, capsys):
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count(": whole (4 files, ") == 3
    flip(folder / "iter_0000002" / TENSORS)
    (folder / "iter_0000001" / CHECKSUMS).unlink()
    assert main(["checkpoint", "verify", str(folder)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("iter_0000001: not verified, it has no checksums (an earlier version saved it)")
    assert f"iter_0000002: damaged: {folder}/iter_0000002/{TENSORS} must have the checksum " in second
    assert ": whole (" in third
    assert main(["checkpoint", "verify", str(folder / "iter_0000003")]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "none")]) == 2
    assert "DIR must hold a checkpoint, got none in" in capsys.readouterr().err
