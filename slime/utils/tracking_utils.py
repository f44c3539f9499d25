"""Older import path of slime plug-ins: see slime.tracking.outbox."""

from slime.system.upstream import refused_names
from slime.tracking.outbox import log

__all__ = ["log"]
__getattr__ = refused_names("slime.utils.tracking_utils")
