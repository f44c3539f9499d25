"""Import path of slime plug-ins: see slime.hooks, slime.rollout.metrics and slime.singleton."""

from slime.hooks import load_function
from slime.rollout.metrics import group_by
from slime.singleton import SingletonMeta

__all__ = ["SingletonMeta", "group_by", "load_function"]
