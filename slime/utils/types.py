"""Import path of slime plug-ins: see slime.types."""

from slime.types import Sample

__all__ = ["Sample"]
