"""Import path of slime plug-ins: see slime.hooks, slime.peers.http, slime.plug_ins and slime.rollout.metrics."""

from slime.hooks import SingletonMeta, load_function
from slime.peers.http import get_current_node_ip
from slime.plug_ins.launch import exec_command
from slime.plug_ins.ports import get_free_port
from slime.plug_ins.rollouts import should_run_periodic_action
from slime.rollout.metrics import group_by
from slime.system.upstream import refused_names

__all__ = [
    "SingletonMeta",
    "exec_command",
    "get_current_node_ip",
    "get_free_port",
    "group_by",
    "load_function",
    "should_run_periodic_action",
]
__getattr__ = refused_names("slime.utils.misc")
