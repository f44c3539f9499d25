"""Import path of slime plug-ins: see slime.tracking.outbox."""

import logging

from slime.system.upstream import refused_names
from slime.tracking.outbox import log

__all__ = ["configure_logger", "log"]


def configure_logger(prefix: str = "") -> None:
    """Prints logged lines from INFO on, for a user's program. Does nothing if logging is already configured, as in a
    run's process, which has a log file. The lines have `prefix` after the time."""
    form = f"%(asctime)s{prefix} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)


__getattr__ = refused_names("slime.observability.logging_utils")
