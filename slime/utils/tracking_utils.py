"""Older import path of slime plug-ins: see slime.tracking.outbox."""

from slime.tracking.outbox import log

__all__ = ["log"]
