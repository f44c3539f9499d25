"""Quantised checkpoints: their schemes, and reading, rounding and writing of their weights."""
