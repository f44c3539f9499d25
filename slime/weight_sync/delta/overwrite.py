"""The encoding overwrite: the new values. Applying one twice gives the same."""

from __future__ import annotations

import numpy as np


def values(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return new


def applied(old: np.ndarray, sent: np.ndarray) -> np.ndarray:
    return sent
