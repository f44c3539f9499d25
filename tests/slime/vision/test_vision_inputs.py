"""Tests of slime.vision.inputs and slime.vision.store: references to processed images."""

import os
import pickle

import pytest
import torch

from slime.vision import store
from slime.vision.inputs import ImageInputs, read_tensors
from slime.vision.store import MediaStore


def pixels(patches: int, value: float) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.full((patches, 6), value),
        "image_grid_thw": torch.tensor([[1, 2, patches // 2]]),
    }


@pytest.fixture
def stored(tmp_path):
    return MediaStore(tmp_path, 1 << 20)


def test_a_reference_survives_pickling_and_maps_what_was_written(stored):
    first = stored.write("image", "aa01", pixels(4, 1.5), tokens=1, grid=(1, 2, 2)).item
    second = stored.write("image", "bb02", pixels(8, 2.5), tokens=2, grid=(1, 2, 4)).item
    inputs = pickle.loads(pickle.dumps(ImageInputs((first, second))))
    found = inputs.tensors()
    assert found["pixel_values"].shape == (12, 6)
    assert found["pixel_values"][:, 0].tolist() == [1.5] * 4 + [2.5] * 8
    assert found["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert inputs.keys == ("aa01", "bb02") and inputs.grids == ((1, 2, 2), (1, 2, 4))
    assert inputs.bytes == 12 * 6 * 4 + 2 * 3 * 8
    assert len(pickle.dumps(inputs)) < 1000


def test_an_image_is_found_again_by_its_key_with_all_fields(stored, tmp_path):
    written = stored.write("video", "cc03", pixels(4, 1.0), tokens=3, grid=(2, 2, 2), text="<video> é")
    assert MediaStore(tmp_path, 1 << 20).find("cc03") == written
    assert stored.find("dd04") is None


def test_a_write_to_a_mapped_tensor_does_not_reach_other_readers(stored):
    item = stored.write("image", "aa01", pixels(4, 1.0), tokens=1, grid=(1, 2, 2)).item
    item.tensors()["pixel_values"].zero_()
    assert item.tensors()["pixel_values"].eq(1.0).all()


def test_turns_add_their_images(stored):
    one = ImageInputs((stored.write("image", "aa01", pixels(4, 1.0), tokens=1, grid=(1, 2, 2)).item,))
    two = ImageInputs((stored.write("image", "bb02", pixels(4, 2.0), tokens=1, grid=(1, 2, 2)).item,))
    assert (one + two).keys == ("aa01", "bb02")


def test_tensors_of_a_plug_in_and_no_images_are_read_too():
    tensors = pixels(4, 3.0)
    assert read_tensors(tensors)["pixel_values"] is tensors["pixel_values"]
    assert read_tensors(None) == {}


def test_a_missing_file_is_an_error_with_its_path(stored):
    item = stored.write("image", "aa01", pixels(4, 1.0), tokens=1, grid=(1, 2, 2)).item
    os.unlink(item.path)
    with pytest.raises(ValueError, match=r"HF_DATASETS_CACHE must .* got no file .*aa01"):
        item.tensors()


def test_the_oldest_files_are_removed_and_used_files_stay(tmp_path):
    small = MediaStore(tmp_path, 1200)
    items = [
        small.write("image", f"{i}a{i}", pixels(4, float(i)), tokens=1, grid=(1, 2, 2)).item for i in range(4)
    ]
    assert all(os.path.exists(item.path) for item in items), "each file was used in the last hour"
    for age, item in enumerate(reversed(items)):
        then = os.stat(item.path).st_mtime - store._IN_USE_S * (1 + age)
        os.utime(item.path, (then, then))
    assert small.find(items[0].key) is not None
    small.trim()
    left = [os.path.exists(item.path) for item in items]
    assert left == [True, False, False, True]
    assert not [name for name in os.listdir(tmp_path / "0a") if name.endswith("partial")]
