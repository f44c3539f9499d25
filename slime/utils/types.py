"""Import path of slime plug-ins: see slime.types."""

from slime.system.upstream import refused_names
from slime.types import Sample
from slime.types import TrainData as RolloutBatch

__all__ = ["RolloutBatch", "Sample"]
__getattr__ = refused_names("slime.utils.types")
