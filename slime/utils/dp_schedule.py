"""Import path that existing plug-ins use; the code is in slime.data.packing."""

from slime.data.packing import build_dp_schedule

__all__ = ["build_dp_schedule"]
