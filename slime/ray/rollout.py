"""Import path of slime plug-ins: see slime.observability. The rollout manager is slime.rollout.manager."""

from slime.observability.metric_utils import *  # noqa: F403
from slime.observability.rollout_metrics import *  # noqa: F403
from slime.system.upstream import refused_names

__getattr__ = refused_names("slime.ray.rollout")
