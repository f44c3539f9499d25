"""Older import path of slime plug-ins: see slime.rollout.data_source."""

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer"]
