"""Import path of slime plug-ins: see slime.agent.adapters.dialects."""

from slime.agent.adapters.dialects import AnthropicAdapter

__all__ = ["AnthropicAdapter"]
