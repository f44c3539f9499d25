"""The data source under the path that existing slime scripts and subclasses use."""

from slime.data.source import PromptDataSource as RolloutDataSourceWithBuffer

__all__ = ["RolloutDataSourceWithBuffer"]
