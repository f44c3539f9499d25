"""Import path of slime plug-ins: see slime.observability.logging_utils."""

from slime.observability.logging_utils import configure_logger, log
from slime.system.upstream import refused_names

__all__ = ["configure_logger", "log"]
__getattr__ = refused_names("slime.observability.logging_utils")
