"""The HTTP servers to which agents of slime's plug-ins send requests. The sessions of this project answer them."""

from slime.agent.adapters.common import BaseAdapter, Sessions
from slime.agent.adapters.dialects import AnthropicAdapter, OpenAIAdapter, ResponsesAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter", "ResponsesAdapter", "Sessions"]
