"""Import path of slime plug-ins: see slime.tracking.outbox."""

import logging

from slime.system.upstream import refused_names
from slime.tracking.outbox import log

__all__ = ["configure_logger", "log"]


def configure_logger(prefix: str = "") -> None:
    """Prints logged lines from INFO on, for a program of the user. Does nothing in a process of a run, which has its
    log file, and where logging is set up. `prefix` comes after the time."""
    form = f"%(asctime)s{prefix} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)


__getattr__ = refused_names("slime.observability.logging_utils")
