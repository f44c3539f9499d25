"""Import path of slime plug-ins: see slime.agent.adapters.dialects."""

from slime.agent.adapters.dialects import ResponsesAdapter

__all__ = ["ResponsesAdapter"]
