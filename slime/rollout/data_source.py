"""Import path of slime plug-ins: see slime.data.data_source."""

from slime.data.data_source import (
    Dataset,
    DataSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    pop_first,
    pop_oldest,
)

__all__ = [
    "DataSource",
    "Dataset",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "pop_first",
    "pop_oldest",
]
