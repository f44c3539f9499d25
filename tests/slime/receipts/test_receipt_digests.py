"""Tests the digests of tensors and files: their bytes, their order, and their independence of the number of threads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime.receipts.digests import digest, digest_files, digest_tensors


def make_tensors() -> dict[str, Tensor]:
    """Returns tensors of several sizes and types, the largest in the middle, and views that are not contiguous."""
    torch.manual_seed(0)
    sizes = (3, 1, 70_000, 0, 129)
    found = {f"weight.{i}": torch.randn(size, 5) for i, size in enumerate(sizes)}
    found |= {"half": found["weight.2"].bfloat16(), "view": found["weight.4"].t(), "step": torch.tensor(7)}
    return found


def test_a_digest_covers_type_shape_and_bytes() -> None:
    value = torch.tensor([[1.0, -2.0]])
    wanted = hashlib.sha256(b"torch.float32 (1, 2):" + value.numpy().tobytes()).hexdigest()
    assert digest_tensors({"a": value}.items(), 4) == {"a": wanted}
    others = (value.reshape(2), value.double(), torch.tensor([[1.0, 2.0]]))
    assert len({wanted, *map(digest, others)}) == 4


@pytest.mark.parametrize("threads", [0, 2, 3, 32])
def test_the_digests_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    named = make_tensors()
    one = digest_tensors(named.items(), 1)
    assert one == {name: digest(value) for name, value in named.items()}
    assert list(one) == list(named)
    assert list(digest_tensors(named.items(), threads).items()) == list(one.items())


def test_the_digests_of_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    contents = {"small": b"1", "sub/large": bytes(range(256)) * 4000, "empty": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    wanted = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for threads in (1, 2, 8):
        assert list(digest_files(tmp_path, contents, threads).items()) == list(wanted.items())
    assert digest_files(tmp_path, [], 2) == {}
