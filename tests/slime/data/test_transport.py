"""Train data that are packed for transport between processes come back unchanged."""

from __future__ import annotations

import pickle

import torch

from slime.data.transport import PackedColumn, pack_columns, unpack_columns


def test_columns_come_back_as_they_were() -> None:
    data = {
        "tokens": [torch.tensor([3, 1, 4]), torch.tensor([1]), torch.tensor([5, 9])],
        "rollout_log_probs": [torch.tensor([-0.5, -2.0]), torch.zeros(0)],
        "rewards": [1.0, 0.0],
        "none": [],
        "mixed": [torch.tensor([1]), torch.tensor([1.5])],
        "images": [torch.zeros(2, 2), torch.zeros(2, 3)],
        "experts": [
            torch.arange(12, dtype=torch.uint8).view(3, 2, 2),
            torch.ones(1, 2, 2, dtype=torch.uint8),
        ],
        "half": [torch.zeros(3, dtype=torch.bfloat16)],
        "step": 7,
    }
    packed = pack_columns(data)
    assert {name for name, column in packed.items() if isinstance(column, PackedColumn)} == {
        "tokens",
        "rollout_log_probs",
        "experts",
    }
    found = unpack_columns(pickle.loads(pickle.dumps(packed)))
    assert found.keys() == data.keys()
    for name, column in data.items():
        if isinstance(column, list) and column and isinstance(column[0], torch.Tensor):
            assert all(
                torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found[name], column, strict=True)
            )
        else:
            assert found[name] == column


def test_unpacked_tensors_may_be_written_to() -> None:
    packed = pack_columns({"tokens": [torch.tensor([1, 2]), torch.tensor([3])]})
    packed["tokens"].values.flags.writeable = False  # Ray's shared memory is read-only, too
    first, second = unpack_columns(packed)["tokens"]
    first += 10
    assert first.tolist() == [11, 12] and second.tolist() == [3]
