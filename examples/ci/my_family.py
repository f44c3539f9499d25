"""A family of your own: ERNIE 4.5, dense. It is Llama with rotary embeddings of neighbouring dimensions."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import only, read_decoder
from slime.models.rope import Rope, read_rope
from slime.models.rows import DENSE, IGNORED


def rope(hf: Hf, head_dim: int) -> Rope:
    return read_rope(hf, head_dim, interleaved=True)


def read(hf: Hf) -> Decoder:
    only(hf, use_bias=False)
    return read_decoder(hf, rope=rope)


ERNIE = Family("ernie4_5", "ERNIE 4.5, dense", "0.3B", DENSE, read, ignored=IGNORED)
