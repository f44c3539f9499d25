"""Finds the cache of `datasets`, which has the tables of prompts and the processed images."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "HF_DATASETS_CACHE"
"""Name of the variable with the folder of the cache."""


def find_cache_folder() -> Path:
    """Returns the cache of `datasets`. Raises ValueError if it cannot be written."""
    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK) else "it cannot be written"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise ValueError(
            f"{CACHE} must be a folder that can be written, got {folder} ({problem}); set this variable to a folder "
            "with room for a copy of the prompts"
        )
    return folder
