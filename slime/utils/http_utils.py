"""Import path of slime plug-ins: see slime.http."""

from slime.http import get, get_host_info, post

__all__ = ["get", "get_host_info", "post"]
