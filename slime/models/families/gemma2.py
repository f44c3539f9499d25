"""Gemma 2: Gemma 3's layers with soft caps of attention scores and logits, without norms of queries and keys. Every
other layer has a sliding window, and all layers share one rotary embedding."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.families.gemma3 import NORMS, gemma
from slime.models.family import Family
from slime.models.rows import ATTENTION, ENDS, IGNORED, MLP


def read(hf: Hf) -> Decoder:
    return gemma(hf, 2)


GEMMA2 = Family("gemma2", "Gemma 2", "2B, 9B, 27B", (*ENDS, *NORMS, *ATTENTION, *MLP), read, ignored=IGNORED)
