"""Import path of slime plug-ins: see slime.observability.logging_utils."""

from slime.observability.logging_utils import configure_logger, log

__all__ = ["configure_logger", "log"]
