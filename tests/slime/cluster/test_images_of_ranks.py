"""Trainer ranks on a host without the processed images get their files from the actor of the rollouts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime.cluster.images import COLUMN, SOURCE, localize, read_files, with_files
from slime.vision.inputs import ImageInputs, MediaFile
from slime.vision.store import MediaStore


@pytest.fixture
def images(tmp_path: Path) -> list[MediaFile]:
    """Returns two images whose files are in a folder that the test moves, as if the host had no such folder."""
    store = MediaStore(tmp_path / "rollouts", 2**30)
    found = [
        store.write(
            "image", f"{n}a0b", {"pixel_values": torch.full((4, 3), float(n))}, tokens=1, grid=(1, 2, 2)
        )
        for n in (1, 2)
    ]
    return [replace(one.item, start=number) for number, one in enumerate(found)]


def test_a_rank_gets_missing_files_once(images: list[MediaFile], tmp_path: Path) -> None:
    first, second = images
    data = {
        "tokens": [],
        COLUMN: [ImageInputs((first, second)), None, ImageInputs((first,)), {"pixel_values": 0}],
    }
    asked: list[list[str]] = []
    (tmp_path / "rollouts").rename(tmp_path / "far")

    def fetch(paths: list[str]) -> list[bytes]:
        asked.append(paths)
        return read_files([path.replace("rollouts", "far") for path in paths])

    def store() -> MediaStore:
        return MediaStore(tmp_path / "trainer", 2**30)

    for _ in range(2):  # the second rollout has the same pictures
        found = localize(data, fetch, store)
        assert asked == [[first.path, second.path]]
        inputs = found[COLUMN]
        assert inputs[1] is None and inputs[3] == {"pixel_values": 0} and found["tokens"] == []
        values = inputs[0].tensors()["pixel_values"]
        assert torch.equal(values[:, 0], torch.tensor([1.0] * 4 + [2.0] * 4))
        assert [item.start for item in inputs[0].items] == [0, 1] and inputs[0].keys == ("1a0b", "2a0b")
        assert all(
            item.path.startswith(str(tmp_path / "trainer")) for one in inputs[::2] for item in one.items
        )


def test_a_host_with_the_files_asks_for_nothing(images: list[MediaFile]) -> None:
    data = {COLUMN: [ImageInputs(tuple(images))]}

    def never(*_: object) -> None:
        raise AssertionError("all files exist")

    assert localize(data, never, never) is data
    assert localize({"tokens": []}, never, never) == {"tokens": []}
    assert with_files({**data, SOURCE: None}) == {**data, SOURCE: None}


def test_a_file_that_no_host_has_is_an_error_with_path_and_host(images: list[MediaFile]) -> None:
    Path(images[0].path).unlink()
    text = f"HF_DATASETS_CACHE must keep the processed images .*got .*1a0b.safetensors on host {socket.gethostname()} "
    with pytest.raises(ValueError, match=text):
        read_files([images[0].path])
    with pytest.raises(ValueError, match=f"got no file .*1a0b.safetensors on host {socket.gethostname()}"):
        images[0].tensors()
