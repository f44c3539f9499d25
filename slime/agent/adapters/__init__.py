"""The addresses that agents of slime's plug-ins talk to, over the sessions of this project."""

from slime.agent.adapters.common import BaseAdapter, Sessions
from slime.agent.adapters.dialects import AnthropicAdapter, OpenAIAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter", "Sessions"]
