"""Import path of slime plug-ins: see slime.plug_ins.cache_refresh."""

from slime.plug_ins.cache_refresh import should_flush_cache

__all__ = ["should_flush_cache"]
