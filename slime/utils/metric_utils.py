"""Import path of slime plug-ins: see slime.observability.metric_utils."""

from slime.observability.metric_utils import *  # noqa: F403
