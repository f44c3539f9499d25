"""Import path of slime plug-ins: see slime.agent.adapters.dialects."""

from slime.agent.adapters.dialects import OpenAIAdapter

__all__ = ["OpenAIAdapter"]
