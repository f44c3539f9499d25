"""Provides numbers of parameters of the hybrid models in scripts/architectures.py."""

from __future__ import annotations

# The numbers leave out vision tower and prediction layer, so published checkpoints have more. They were computed from
# the shapes.
TEXT_ONLY = {
    "qwen3-next-80b-a3b": 79_674_391_296,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
}
