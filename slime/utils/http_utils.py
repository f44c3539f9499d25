"""Import path of slime plug-ins: see slime.peers.http."""

from slime.peers.http import get, get_host_info, post

__all__ = ["get", "get_host_info", "post"]
