"""Qwen2 and Qwen2.5, dense: bias on queries, keys and values."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import only, read_decoder
from slime.models.rows import DENSE, IGNORED


def read(hf: Hf) -> Decoder:
    """Returns the decoder. Raises ValueError for sliding windows, which no published model of this family enables."""
    only(hf, use_sliding_window=False)
    return read_decoder(hf, qkv_bias=True)


QWEN2 = Family("qwen2", "Qwen2.5, dense", "0.5B, 1.5B, 7B, 32B", DENSE, read, ignored=IGNORED)
