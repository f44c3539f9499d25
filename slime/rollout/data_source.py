"""Import path of existing slime scripts and subclasses: see slime.data.source."""

from slime.data.source import PromptDataSource as RolloutDataSourceWithBuffer

__all__ = ["RolloutDataSourceWithBuffer"]
