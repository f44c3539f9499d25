"""Mistral, dense: Llama's layers with a sliding window in all layers, if config.json has a window."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.family import Family
from slime.models.reading import read_decoder, sliding_windows
from slime.models.rows import DENSE, IGNORED


def read(hf: Hf) -> Decoder:
    return read_decoder(hf, windows=sliding_windows(hf))


MISTRAL = Family(
    "mistral", "Mistral, dense", "7B v0.1 to v0.3, Nemo 12B, Small 24B", DENSE, read, ignored=IGNORED
)
