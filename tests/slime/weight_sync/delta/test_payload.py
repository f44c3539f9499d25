"""Differences of tensors: exact to the bit, for all bits, and damage is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.weight_sync.delta import sparse
from slime.weight_sync.delta.payload import apply, encode, octets
from slime.weight_sync.delta.registry import CHECKSUMS, ENCODINGS, checksum, encoding

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.complex128]


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all: infinities, subnormals and payloads of NaN among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    data = torch.randint(top, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).view(shape)


def changed(old: torch.Tensor, share: float, seed: int = 7) -> torch.Tensor:
    """Other bits in a `share` of the values."""
    new, other = old.clone(), bits(tuple(old.shape), old.dtype, seed)
    mask = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) < share
    octets(new).reshape(-1, old.dtype.itemsize)[mask.view(-1).numpy()] = octets(other).reshape(
        -1, old.dtype.itemsize
    )[mask.view(-1).numpy()]
    return new


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (7, 13), (3, 1, 2, 5), (513, 129)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_the_new_bits_come_out(name: str, dtype: torch.dtype, shape: tuple[int, ...], share: float) -> None:
    old = bits(shape, dtype, 1)
    new = changed(old, share)
    payload, count = encode(octets(old), octets(new), dtype.itemsize, by=name, checked_by="sha256")
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
    payload, count = encode(octets(old), octets(new), 4, by="xor", checked_by="xxh3-128")
    assert count == 12
    result = octets(old).copy()
    assert apply(result, payload) is None and result.tobytes() == octets(new).tobytes()


def test_large_tensors_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "PIECE", 1000)
    old = bits((70, 99), torch.bfloat16, 3)
    new = old.clone()
    new[10:12] = changed(old[10:12], 0.5)  # other pieces have no change
    new[-1, -1] = 5.0
    payload, _ = encode(octets(old), octets(new), 2, by="overwrite", checked_by="adler32")
    result = octets(old).copy()
    assert apply(result, payload) is None and np.array_equal(result, octets(new))


def test_distances_of_every_width() -> None:
    old = torch.zeros(200_000, dtype=torch.bfloat16)
    for positions in ([3, 250], [3, 60_000], [3, 199_999]):
        new = old.clone()
        new[positions] = 1.5
        payload, count = encode(octets(old), octets(new), 2, by="xor", checked_by="adler32")
        result = octets(old).copy()
        assert count == 4 and payload.nbytes < 200
        assert apply(result, payload) is None and np.array_equal(result, octets(new))


def test_few_changed_values_take_few_bytes() -> None:
    old = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = old.clone()
    new.view(torch.int16)[::50] ^= 1  # a fiftieth, by the last bit
    sizes = {
        name: encode(octets(old), octets(new), 2, by=name, checked_by="sha256")[0].nbytes
        for name in ENCODINGS
    }
    assert sizes["xor"] < sizes["overwrite"] < old.nbytes / 50


@pytest.mark.parametrize("name", ENCODINGS)
def test_damage_is_found(name: str) -> None:
    old = bits((64, 65), torch.bfloat16, 1)
    new = changed(old, 0.1)
    payload, _ = encode(octets(old), octets(new), 2, by=name, checked_by="xxh3-128")
    head = payload.numpy().tobytes().index(b"\n") + 1
    for at in (2, head, head + 5, head + 20, payload.nbytes // 2, payload.nbytes - 1):
        broken = payload.clone()
        broken[at] ^= 1
        assert apply(octets(old).copy(), broken) is not None, f"byte {at}"
    assert apply(octets(old).copy(), payload[: head + 200]) is not None
    other = octets(old).copy()
    other[0] ^= 1  # not the base; an overwritten value may have been there
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
