"""Import path of slime plug-ins: see slime.peers.http and slime.plug_ins.ports."""

from slime.peers.http import get, get_host_info, post
from slime.plug_ins.ports import (
    find_available_port,
    get_rollout_num_engines,
    init_http_client,
    is_port_available,
)
from slime.system.upstream import refused_names

__all__ = [
    "find_available_port",
    "get",
    "get_host_info",
    "get_rollout_num_engines",
    "init_http_client",
    "is_port_available",
    "post",
]
__getattr__ = refused_names("slime.utils.http_utils")
