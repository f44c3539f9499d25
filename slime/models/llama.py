"""Llama 3 and other models of its architecture, with any rotary scaling."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import only, read_decoder
from slime.models.rows import DENSE, IGNORED


def read(hf: Hf) -> Decoder:
    """ValueError for `attention_bias`, which also means a bias after the attention."""
    only(hf, attention_bias=False)
    return read_decoder(hf)


LLAMA = Family(
    "llama", "Llama 3", "3.2 1B and 3B, 3.1 8B and 70B, 3.3 70B", DENSE, read, ignored=IGNORED
)
