"""Llama 3 and other models of its architecture, with any rotary scaling."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import read_decoder
from slime.models.rows import DENSE, IGNORED, OUTPUT_BIAS


def read(hf: Hf) -> Decoder:
    """Returns the decoder. `attention_bias` means a bias in all four projections of the attention."""
    bias = bool(hf.get("attention_bias", False))
    return read_decoder(hf, qkv_bias=bias, output_bias=bias)


LLAMA = Family(
    "llama", "Llama 3", "3.2 1B and 3B, 3.1 8B and 70B, 3.3 70B", (*DENSE, OUTPUT_BIAS), read, ignored=IGNORED
)
