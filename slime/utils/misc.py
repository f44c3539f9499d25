"""Import path of slime plug-ins: see slime.hooks, slime.peers.http, slime.plug_ins.launch and slime.rollout.metrics."""

from slime.hooks import SingletonMeta, load_function
from slime.peers.http import get_current_node_ip
from slime.plug_ins.launch import exec_command
from slime.rollout.metrics import group_by

__all__ = ["SingletonMeta", "exec_command", "get_current_node_ip", "group_by", "load_function"]
