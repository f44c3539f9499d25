"""If a disk is full, the error names the folder and the flag, and the earlier checkpoint still loads."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from config_cases import good_argv
from megatron_cases import make_config, sequences, tiny_checkpoint, train_step

from slime.checkpoints.checkpoint_dir import latest
from slime.data.source import PromptDataSource
from slime.megatron_backend.checkpoint.distributed import load_checkpoint, save_checkpoint
from slime.megatron_backend.checkpoint.weights import save_hf
from slime.megatron_backend.model.gpt import build_model
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.optimizer import build_optimizer
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.rules import parse_args
from slime.system.disk_space import DiskSpaceGuard, require_free_bytes
from slime.tracking.events import Events
from slime.tracking.journal import read_events
from slime.tracking.kinds import DAMAGED
from slime.tracking.trackers import JsonlTracker
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices
from vime.run.disk_space import require_disk_space

MIB = 2**20


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of the given bytes."""
    mounted = []

    def mount(size: int) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small tmpfs is not permitted here")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Limits the size of files that this process writes, as a quota does: the process gets EFBIG and no signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    tiny_checkpoint(path := tmp_path_factory.mktemp("hf"))
    return path


@pytest.fixture(scope="module")
def parts(hf_dir):
    config = make_config(lr=1e-3)
    init_parallel(0, 1, config, init_method=f"file://{hf_dir}/store")
    model = build_model(load_hf_config(hf_dir), config)
    parts = model, *build_optimizer(model, config, total_steps=10)
    train_step(*parts, sequences(0))
    yield parts
    destroy_parallel()


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def refused(action: Callable[[], object], flag: str, folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        action()
    text = str(error.value)
    assert text.startswith(f"{flag} must have ") and str(folder) in text and "\n" not in text, text
    assert text.endswith(f"remove files there, or name another folder with {flag}")
    return text


def as_before(folder: Path, parts) -> None:
    assert latest(folder) == 1 and load_checkpoint(folder, *parts) == {"at": 1}
    assert sorted(p.name for p in folder.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["all", "overhead", "common"])
def test_a_disk_too_small_for_a_second_checkpoint_keeps_the_first(parts, tmp_path, disk, missing):
    """The save fails before it writes a byte, while it writes the tensors, or in torch's writer in C++."""
    save_checkpoint(tmp_path / "sized", 1, *parts, extra={"at": 1})
    one = bytes_of(tmp_path / "sized")
    folder = disk({"all": one * 3 // 2, "overhead": 2 * one - 16 * 1024, "common": one * 3 // 2}[missing])
    save_checkpoint(folder, 1, *parts, extra={"at": 1})
    rest = None
    if missing == "common":
        rest = folder / "rest"
        with pytest.raises(OSError), rest.open("wb") as file:
            file.write(bytes(one))
    text = refused(lambda: save_checkpoint(folder, 2, *parts), "--save", folder)
    if missing == "all":
        assert "MiB of room for the tensors of a checkpoint, got " in text
    else:
        assert "'No space left on device'" in text and "(0 MiB free)" in text
    if rest:
        rest.unlink()
    as_before(folder, parts)


def test_a_quota_reached_in_the_middle_keeps_the_first(parts, tmp_path, largest_file):
    save_checkpoint(tmp_path, 1, *parts, extra={"at": 1})
    largest_file(bytes_of(tmp_path) // 2)
    assert "'File too large'" in refused(lambda: save_checkpoint(tmp_path, 2, *parts), "--save", tmp_path)
    as_before(tmp_path, parts)


def test_what_a_killed_save_left_makes_room(parts, tmp_path):
    (tmp_path / ".iter_0000007.partial").mkdir()
    save_checkpoint(tmp_path, 1, *parts, extra={"at": 1})
    as_before(tmp_path, parts)


def test_the_directory_of_weights(disk):
    folder = disk(4 * MIB)
    channel, tensor = FileChannel(folder / "weights"), torch.zeros(2 * MIB, dtype=torch.uint8)
    channel.publish(whole_slices([("a", tensor)]), 1)
    text = refused(
        lambda: channel.publish(whole_slices([("a", tensor)]), 2), "--weight-dir", folder / "weights"
    )
    assert "must have 2 MiB of room for version 2 of the weights, got 2 MiB free" in text
    rest = torch.zeros(2 * MIB - 8192, dtype=torch.uint8)  # the header does not fit
    text = refused(
        lambda: channel.publish(whole_slices([("a" * 9000, rest)]), 2), "--weight-dir", folder / "weights"
    )
    assert "'No space left on device'" in text
    assert [file.name for file in (folder / "weights").iterdir()] == ["weights-1"]


def test_a_hugging_face_directory(parts, hf_dir, disk):
    folder = disk(64 * 1024)
    assert "'No space left on device'" in refused(
        lambda: save_hf(parts[0], hf_dir, folder / "hf"), "--save-hf", folder / "hf"
    )
    assert not (folder / "hf/config.json").exists()


def test_metrics_and_the_data_position(disk):
    folder = disk(64 * 1024)
    tracker = JsonlTracker(folder / "metrics.jsonl", {})
    (folder / "rest").write_bytes(bytes(60 * 1024))
    many = {f"train/{i}": 0.1 for i in range(100)}
    text = refused(lambda: [tracker.log(many, i, "train/step") for i in range(99)], "--run-dir", folder)
    assert "must have room for metrics.jsonl, got 'No space left on device'" in text
    refused(tracker.close, "--run-dir", folder)
    source = object.__new__(PromptDataSource)
    source.args, source.state_dict = SimpleNamespace(save=str(folder)), lambda: {"buffer": "x" * 9999}
    refused(lambda: source.save(3), "--save", folder / "rollout")


def test_an_event_that_fills_the_disk_damages_no_other(disk):
    """The kernel writes the part that fits and reports its size. The next event starts a new line."""
    folder = disk(64 * 1024)
    events = Events("driver", str(folder))
    events.add("start", rollout=0)
    text = refused(lambda: events.add("error", type="E", text="x" * 70_000), "--run-dir", folder)
    events.close()
    assert "must have room for the run's events, got 'No space left on device'" in text
    cut = (folder / "events.jsonl").read_bytes()
    assert len(cut) == 64 * 1024 and not cut.endswith(b"\n")
    os.truncate(folder / "events.jsonl", 50_000)  # this frees room as a removed file would
    (events := Events("driver", str(folder))).add("start", rollout=7)
    events.close()
    kinds = [(event.kind, event.get("rollout")) for event in read_events(folder, ("start", DAMAGED))]
    assert kinds == [("start", 0), (DAMAGED, None), ("start", 7)]


def test_a_run_asks_for_room_before_it_starts(tmp_path, disk):
    argv = [*good_argv(tmp_path), "--update-weight-transport", "disk"]

    def asked(*flags: str) -> None:
        require_disk_space(parse_args([*argv, "--weight-dir", str(tmp_path), *flags]))

    folder = disk(4096)
    asked("--save", str(tmp_path / "save"))
    assert "3 versions of the weights" in refused(
        lambda: asked("--weight-dir", str(folder / "new")), "--weight-dir", folder / "new"
    )
    assert "for a checkpoint" in refused(lambda: asked("--save", str(folder)), "--save", folder)


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(OSError, match="Is a directory"), DiskSpaceGuard("--save", tmp_path, "a file"):
        tmp_path.write_bytes(b"")
    with pytest.raises(RuntimeError, match="inline_container"), DiskSpaceGuard("--save", tmp_path, "a file"):
        raise RuntimeError("enforce fail at inline_container.cc")
    require_free_bytes("--save", tmp_path / "absent", 1, "a byte")
    with pytest.raises(ValueError, match=r"^--save must have 1,048,576,000,000 MiB of room for it, got "):
        require_free_bytes("--save", tmp_path, 2**20 * MIB * 10**6, "it")
