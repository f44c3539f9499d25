"""The encoding xor: the bits that changed. Small, because few bits of a value change."""

from __future__ import annotations

import numpy as np


def values(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.bitwise_xor(old, new)


def applied(old: np.ndarray, sent: np.ndarray) -> np.ndarray:
    return np.bitwise_xor(old, sent)
