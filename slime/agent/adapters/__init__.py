"""The addresses that agents of slime's plug-ins talk to, over the sessions of this project."""

from slime.agent.adapters.common import BaseAdapter, Sessions
from slime.agent.adapters.dialects import AnthropicAdapter, OpenAIAdapter, ResponsesAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter", "ResponsesAdapter", "Sessions"]
