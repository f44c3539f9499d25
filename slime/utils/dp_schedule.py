"""Import path of slime plug-ins: see slime.data.packing."""

from slime.data.packing import build_dp_schedule

__all__ = ["build_dp_schedule"]
