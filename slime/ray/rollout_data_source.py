"""Older import path of slime plug-ins: see slime.data.data_source."""

from slime.data.data_source import RolloutDataSource, RolloutDataSourceWithBuffer

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer"]
