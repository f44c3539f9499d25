"""Tests weights as files: the written files, the kept files, and digests that depend on every bit."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.weight_sync.channel import Worker
from slime.weight_sync.file_channel import FileChannel, FileReceiver, tensor_digest
from slime.weight_sync.slices import whole_slices


def weights(value: float):
    yield "a.weight", torch.full((2, 3), value)
    yield "b", torch.tensor([value], dtype=torch.bfloat16)


def files(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_publish_writes_all_tensors(tmp_path):
    channel = FileChannel(tmp_path / "new" / "weights")
    assert (tmp_path / "new/weights").stat().st_mode & 0o777 == 0o700
    update = channel.publish(whole_slices(weights(1.5)), 3)
    path = tmp_path / "new/weights/weights-3/model.safetensors"
    assert update.version == 3 and update.info == {"path": str(path)}
    json.dumps(update.info)  # the message is sent as JSON
    loaded = load_file(path)
    assert loaded["a.weight"].tolist() == [[1.5] * 3] * 2
    assert loaded["b"].dtype == torch.bfloat16 and loaded["b"].item() == 1.5


def test_the_newest_two_versions_stay(tmp_path):
    channel = FileChannel(tmp_path)
    (tmp_path / "weights-0").mkdir()
    (tmp_path / "weights-0/model.partial").write_bytes(b"left by a killed run")
    (tmp_path / "other.txt").write_text("not ours")
    for version in range(4):
        channel.publish(whole_slices(weights(version)), version)
    assert files(tmp_path) == ["other.txt", "weights-2", "weights-3"]
    channel.publish(whole_slices(weights(9.0)), 3)  # a resumed run publishes its version again
    assert load_file(tmp_path / "weights-3/model.safetensors")["a.weight"][0, 0] == 9.0
    channel.publish(whole_slices(weights(0.0)), 0)  # another run in the same directory starts over
    assert files(tmp_path) == ["other.txt", "weights-0"]


def test_all_versions_stay_if_they_are_kept(tmp_path):
    channel = FileChannel(tmp_path, keep_files=True)
    for version in range(4):
        channel.publish(whole_slices(weights(version)), version)
    assert files(tmp_path) == [f"weights-{version}" for version in range(4)]


def test_a_cut_off_write_leaves_the_old_version(tmp_path):
    channel = FileChannel(tmp_path)
    channel.publish(whole_slices(weights(1.0)), 1)

    def cut_off():
        yield "a.weight", torch.zeros(2)
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        channel.publish(whole_slices(cut_off()), 2)
    assert files(tmp_path) == ["weights-1"]


def test_an_engine_takes_a_file_or_a_folder_of_files(tmp_path):
    inside = tmp_path / "weights"
    path = FileChannel(inside).publish(whole_slices(weights(2.0)), 1).info["path"]
    save_file({"c": torch.ones(4)}, inside / "weights-1/second.safetensors")
    receiver = FileReceiver(Worker(torch.device("cpu"), 0, None, str(inside)))
    with receiver.receive({"path": path}) as part:
        assert part.shapes == {"a.weight": [2, 3], "b": [1]}
    with receiver.receive({"path": str(inside / "weights-1")}) as part:
        assert part.shapes == {"a.weight": [2, 3], "b": [1], "c": [4]}
        assert (part.get("b").item(), part.get("c").sum().item()) == (2.0, 4.0)
    (inside / "empty").mkdir()
    with (
        pytest.raises(ValueError, match="must have a safetensors file"),
        receiver.receive({"path": str(inside / "empty")}),
    ):
        pass
    save_file({"d": torch.ones(1)}, tmp_path / "outside.safetensors")
    (inside / "empty/link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(ValueError, match="must lie under"), receiver.receive({"path": str(inside / "empty")}):
        pass


def test_checksums_are_of_the_bytes(tmp_path):
    update = FileChannel(tmp_path).publish(whole_slices(weights(1.0)), 1, checksums=True)
    want = hashlib.sha256(struct.pack("<6f", *[1.0] * 6)).hexdigest()
    assert update.info["checksums"] == {
        "a.weight": [(((0, 2), (0, 3)), want)],
        "b": [(((0, 1),), hashlib.sha256(b"\x80\x3f").hexdigest())],
    }


def test_digest_sees_dtype_order_and_bits():
    x = torch.arange(6.0).view(2, 3)
    assert tensor_digest(x) == tensor_digest(x.clone()) == tensor_digest(x.t().contiguous().t())
    flipped = x.clone()
    flipped.view(torch.int32)[0, 1] ^= 1
    different = [x.t(), x.bfloat16(), flipped, x.double()]
    assert len({tensor_digest(t) for t in [x, *different]}) == 5
    assert tensor_digest(torch.tensor(2.0)) == tensor_digest(torch.tensor([2.0]))
    assert tensor_digest(torch.empty(0)) == hashlib.sha256(b"").hexdigest()
