"""Every symbol of `datasets` that this project replaces."""

from __future__ import annotations

from slime.bridges import Patch

LOCK = Patch(
    symbol="datasets.builder:FileLock",
    replacement="slime.data.cache_lock:cache_lock",
    condition="while a driver reads a file of prompts",
    why="datasets waits for the lock of a dead process without an end, and reports nothing while it waits",
    removed_when="datasets takes a lock class as a setting",
)
PATCHES = (LOCK,)
