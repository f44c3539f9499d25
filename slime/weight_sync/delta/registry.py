"""The encodings and checksums of deltas, one entry each. To add one, write its file and its entry here.

The flags read the entries, so this file imports no numpy. An encoding is a file with two functions over words, the bits
of values as unsigned integers:

    values(old, new)        returns the words to send for the values that changed
    applied(old, sent)      returns the new values
"""

from __future__ import annotations

import hashlib
import importlib
import zlib
from collections.abc import Callable
from types import ModuleType

ENCODINGS = {
    "xor": "slime.weight_sync.delta.xor",
    "overwrite": "slime.weight_sync.delta.overwrite",
}
"""Values of --update-weight-delta-encoding, and their files."""


def encoding(name: str) -> ModuleType:
    """Returns the file of an encoding. Raises ValueError for an encoding that this version does not have."""
    if name not in ENCODINGS:
        raise ValueError(
            f"--update-weight-delta-encoding must be one of {', '.join(ENCODINGS)}, got {name}; trainer and engine "
            "must have the same version"
        )
    return importlib.import_module(ENCODINGS[name])


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--update-weight-delta-checksum must be of an installed package, got {name}, which is not installed on "
            f"this host; pip install {name}, or take sha256"
        ) from error


CHECKSUMS: dict[str, Callable[[bytes | memoryview], str]] = {
    "xxh3-128": lambda data: str(_package("xxhash").xxh3_128_hexdigest(data)),
    "blake3": lambda data: str(_package("blake3").blake3(data).hexdigest()),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}
"""Values of --update-weight-delta-checksum, and the functions that return the hex digest of bytes."""


def checksum(name: str, data: bytes | memoryview) -> str:
    """Returns the hex digest of `data`. Raises ValueError for a checksum that this host cannot compute."""
    if name not in CHECKSUMS:
        raise ValueError(
            f"--update-weight-delta-checksum must be one of {', '.join(CHECKSUMS)}, got {name}; trainer and engine "
            "must have the same version"
        )
    return CHECKSUMS[name](data)
