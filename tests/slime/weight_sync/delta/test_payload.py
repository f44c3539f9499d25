"""Differences of tensors are exact to the bit, for all bits, and damage is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.weight_sync.delta import sparse
from slime.weight_sync.delta.payload import apply, encode, octets
from slime.weight_sync.delta.registry import CHECKSUMS, ENCODINGS, checksum, encoding
from slime.weight_sync.slices import SlicePosition, Where

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.complex128]


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns random bits, which include infinities, subnormals and payloads of NaN."""
    size = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    data = torch.randint(top, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).view(shape)


def changed(old: torch.Tensor, share: float, seed: int = 7) -> torch.Tensor:
    """Changes the bits of a `share` of the values."""
    new, other = old.clone(), bits(tuple(old.shape), old.dtype, seed)
    mask = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) < share
    octets(new).reshape(-1, old.dtype.itemsize)[mask.view(-1).numpy()] = octets(other).reshape(
        -1, old.dtype.itemsize
    )[mask.view(-1).numpy()]
    return new


def position(tensor: torch.Tensor, where: Where | None = None) -> SlicePosition:
    """Returns the position of the whole tensor, or of a slice."""
    shape = tuple(tensor.shape)
    whole = tuple((0, size) for size in shape)
    return SlicePosition(
        "x", str(tensor.dtype).removeprefix("torch."), shape, whole if where is None else where
    )


def record(
    old: torch.Tensor, new: torch.Tensor, by: str, checked_by: str = "sha256"
) -> tuple[torch.Tensor, int]:
    """Returns the record from one whole tensor to another."""
    return encode(octets(old), octets(new), position(old), by=by, checked_by=checked_by)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (7, 13), (3, 1, 2, 5), (513, 129)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_the_new_bits_come_out(name: str, dtype: torch.dtype, shape: tuple[int, ...], share: float) -> None:
    old = bits(shape, dtype, 1)
    new = changed(old, share)
    payload, count = record(old, new, name)
    differing = (
        (octets(old).reshape(-1, dtype.itemsize) != octets(new).reshape(-1, dtype.itemsize)).any(1).sum()
    )
    if dtype.itemsize <= 8:
        assert count == differing * dtype.itemsize
    result = octets(old).copy()
    assert apply(result, payload) is None
    assert np.array_equal(result, octets(new))


def test_signs_of_zero_and_payloads_of_nan_are_changes() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, float("inf")])
    new = torch.tensor([-0.0, float("nan"), 1.0, -float("inf")])
    new.view(torch.int32)[1] ^= 1  # another NaN
    payload, count = record(old, new, "xor", "xxh3-128")
    assert count == 12
    result = octets(old).copy()
    assert apply(result, payload) is None and result.tobytes() == octets(new).tobytes()


def test_large_tensors_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "PIECE", 1000)
    old = bits((70, 99), torch.bfloat16, 3)
    new = old.clone()
    new[10:12] = changed(old[10:12], 0.5)  # other pieces have no change
    new[-1, -1] = 5.0
    payload, _ = record(old, new, "overwrite", "adler32")
    result = octets(old).copy()
    assert apply(result, payload) is None and np.array_equal(result, octets(new))


def test_distances_of_every_width() -> None:
    old = torch.zeros(200_000, dtype=torch.bfloat16)
    for positions in ([3, 250], [3, 60_000], [3, 199_999]):
        new = old.clone()
        new[positions] = 1.5
        payload, count = record(old, new, "xor", "adler32")
        result = octets(old).copy()
        assert count == 4 and payload.nbytes < 250
        assert apply(result, payload) is None and np.array_equal(result, octets(new))


def test_few_changed_values_take_few_bytes() -> None:
    old = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = old.clone()
    new.view(torch.int16)[::50] ^= 1  # a fiftieth, by the last bit
    sizes = {name: record(old, new, name)[0].nbytes for name in ENCODINGS}
    assert sizes["xor"] < sizes["overwrite"] < old.nbytes / 50


CUTS = {
    "rows": ((6, 8), [((0, 2), (0, 8)), ((2, 6), (0, 8))]),
    "columns": ((6, 8), [((0, 6), (0, 3)), ((0, 6), (3, 8))]),
    "both": ((6, 8), [(rows, columns) for rows in ((0, 1), (1, 6)) for columns in ((0, 4), (4, 8))]),
    "experts": ((3, 4, 5), [((i, i + 1), (0, 4), columns) for i in range(3) for columns in ((0, 2), (2, 5))]),
}


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.complex128], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_records_of_slices_give_the_whole_tensor(name: str, dtype: torch.dtype, cut: str) -> None:
    shape, slices = CUTS[cut]
    old = bits(shape, dtype, 1)
    new = changed(old, 0.3)
    records = [
        encode(
            *(octets(position(old, where).of(tensor).contiguous()) for tensor in (old, new)),
            position(old, where),
            by=name,
            checked_by="sha256",
        )
        for where in slices
    ]
    result = octets(old).copy()
    assert apply(result, torch.cat([each for each, _ in reversed(records)])) is None
    assert np.array_equal(result, octets(new))
    if dtype.itemsize <= 8:
        assert sum(count for _, count in records) == record(old, new, name)[1]
    lost, twice = records[1:], [records[0], *records]
    sizes = [position(old, where).nbytes for where in slices]
    for given, size in ((lost, sum(sizes[1:])), (twice, sizes[0] + sum(sizes))):
        said = apply(octets(old).copy(), torch.cat([each for each, _ in given]))
        if name == "overwrite" or given is lost:  # an xor that is applied twice restores the old values
            assert said == f"{old.nbytes} bytes must have a record, got records of {size}"
        else:
            assert said is not None


def test_a_slice_that_is_wrong_does_not_reach_the_tensor() -> None:
    """The slice is not contiguous, so the change happens in a copy."""
    old = bits((6, 8), torch.float32, 1)
    where = ((0, 6), (2, 5))
    part = position(old, where).of(old).contiguous()
    made, _ = encode(
        octets(part), octets(changed(part, 0.5)), position(old, where), by="overwrite", checked_by="sha256"
    )
    digest = made.numpy().tobytes().index(b'"digest":"') + len('"digest":"')
    made[digest] = ord("1") if made[digest] == ord("0") else ord("0")
    result = octets(old).copy()
    said = apply(result, made)
    assert said is not None and said.startswith("sha256 must be ")
    assert np.array_equal(result, octets(old))


@pytest.mark.parametrize("name", ENCODINGS)
def test_damage_is_found(name: str) -> None:
    old = bits((64, 65), torch.bfloat16, 1)
    new = changed(old, 0.1)
    payload, _ = record(old, new, name, "xxh3-128")
    head = payload.numpy().tobytes().index(b"\n") + 1
    for at in (2, head, head + 5, head + 20, payload.nbytes // 2, payload.nbytes - 1):
        broken = payload.clone()
        broken[at] ^= 1
        assert apply(octets(old).copy(), broken) is not None, f"byte {at}"
    assert apply(octets(old).copy(), payload[: head + 200]) is not None
    other = octets(old).copy()
    other[0] ^= 1  # this is not the base; an overwritten value may have been there
    said = apply(other, payload)
    assert said is None or "xxh3-128 must be" in said
    said = apply(octets(old)[:-2].copy(), payload)
    assert said == f"{old.nbytes} bytes must change, got a tensor of {old.nbytes - 2}"


def test_checksums_are_the_known_ones() -> None:
    assert checksum("xxh3-128", b"") == "99aa06d3014798d86001c324468d497f"
    assert checksum("adler32", b"Wikipedia") == "11e60398"
    assert checksum("sha256", b"").startswith("e3b0c442")


def test_names_that_no_file_has() -> None:
    with pytest.raises(
        ValueError, match="--update-weight-delta-encoding must be one of xor, overwrite, got sparse"
    ):
        encoding("sparse")
    with pytest.raises(ValueError, match="--update-weight-delta-checksum must be one of .*, got crc"):
        checksum("crc", b"")


def test_a_checksum_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    assert "blake3" in CHECKSUMS
    monkeypatch.setitem(sys.modules, "blake3", None)  # as if it were not installed
    with pytest.raises(ValueError, match="must be of an installed package, got blake3, .* or take sha256"):
        checksum("blake3", b"")
