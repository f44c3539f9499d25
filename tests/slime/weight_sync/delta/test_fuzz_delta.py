"""Deltas over generated and damaged records are either applied or rejected with an error, within bounded memory."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from slime.weight_sync.delta.payload import apply, encode
from slime.weight_sync.slices import SlicePosition

PLACE = SlicePosition("x", "bfloat16", (8, 8), ((0, 8), (0, 8)))
OLD, NEW = np.zeros(128, np.uint8), np.arange(128, dtype=np.uint8)


def right() -> bytes:
    return encode(OLD, NEW, PLACE, by="xor", checked_by="sha256")[0].numpy().tobytes()


def applied(content: bytes) -> str | None:
    return apply(OLD.copy(), torch.frombuffer(bytearray(content or b"\n"), dtype=torch.uint8))


def test_any_header_is_applied_or_refused(fuzz: Callable[..., None]) -> None:
    line, _, packed = right().partition(b"\n")
    header = json.loads(line)
    leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
    values = (
        leaves
        | st.lists(leaves | st.lists(leaves, max_size=3), max_size=3)
        | st.dictionaries(leaves, leaves, max_size=1)
    )

    def check(changes: dict[str, object]) -> None:
        said = applied(json.dumps({**header, **changes}).encode() + b"\n" + packed)
        assert said is not None or {**header, **changes} == header

    fuzz(
        check,
        st.dictionaries(
            st.sampled_from(sorted(header)) | st.text(max_size=3), values, min_size=1, max_size=3
        ),
    )


def test_any_damage_is_refused_or_harmless(fuzz: Callable[..., None]) -> None:
    content = right()

    def check(case: tuple[int, int, bytes]) -> None:
        at, size, new = case
        position = at % len(content)
        applied(content[:position] + new + content[position + size :])

    fuzz(check, st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.binary(max_size=6)))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": ["8", 8]},
        {"shape": [8.0, 8]},
        {"shape": 2**34},
        {"itemsize": True},
        {"itemsize": 2**34},
        {"where": [[0, 2**40], [0, 8]]},
        {"where": [[-8, 8], [0, 8]]},
        {"where": "xx"},
        {"packed_bytes": -1},
        {"packed_bytes": 2**34},
        {"digest": None},
        {"more": 1},
    ],
)
def test_a_header_of_wrong_types_asks_for_no_memory(changes: dict[str, object]) -> None:
    line, _, packed = right().partition(b"\n")
    said = applied(json.dumps({**json.loads(line), **changes}).encode() + b"\n" + packed)
    assert said is not None and "must" in said
    assert applied(b"[" * 5000 + b"\n") is not None


def test_a_record_that_unpacks_to_gigabytes_is_refused_first() -> None:
    line, _, _ = right().partition(b"\n")
    bomb = zlib.compress(bytes(2**28), 9)
    packed = struct.pack("<3I", 64, 1, len(bomb)) + bomb
    header = {**json.loads(line), "packed_bytes": len(packed)}
    import tracemalloc

    tracemalloc.start()
    try:
        said = applied(json.dumps(header).encode() + b"\n" + packed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said is not None and "values must come with their positions" in said and peak < 2**23
