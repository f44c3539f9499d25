"""The encoding `xor` sends the bits that changed. Records are small, because few bits of a value change."""

from __future__ import annotations

import numpy as np


def values(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    found: np.ndarray = old ^ new
    return found


def applied(old: np.ndarray, sent: np.ndarray) -> np.ndarray:
    found: np.ndarray = old ^ sent
    return found
