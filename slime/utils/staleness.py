"""Import path of slime plug-ins: see slime.plug_ins.staleness."""

from slime.plug_ins.staleness import compute_staleness_metrics, fully_async_metrics_enabled, sample_staleness

__all__ = ["compute_staleness_metrics", "fully_async_metrics_enabled", "sample_staleness"]
