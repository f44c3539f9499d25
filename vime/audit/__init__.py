"""`vime audit RUN_DIR`: where the difference between a trainer's and an engine's log-probs comes from."""

from vime.audit.command import main

__all__ = ["main"]
