"""The rule by which --flush-cache-interval counts weight updates. It has slime's name, because plug-ins import it."""

from __future__ import annotations


def should_flush_cache(
    flush_cache_interval: int, weight_version: int, initial_weight_version: int = 0
) -> bool:
    """Returns True if the engines drop their prefix cache with this update: with the first update after
    `initial_weight_version`, and then with every `flush_cache_interval`th update, counted from version 1. An interval
    of 0 or less keeps the cache after the first update."""
    if weight_version == initial_weight_version + 1:
        return True
    return flush_cache_interval > 0 and (weight_version - 1) % flush_cache_interval == 0
