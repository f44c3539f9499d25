"""Import path of slime plug-ins: see slime.weight_sync.cache_flush."""

from slime.weight_sync.cache_flush import should_flush_cache

__all__ = ["should_flush_cache"]
