"""Which paths each adapter serves. What the bodies mean is the sessions' affair."""

from __future__ import annotations

from slime.agent.adapters.common import BaseAdapter


class OpenAIAdapter(BaseAdapter):
    """Chat completions and Responses."""

    paths = ("chat/completions", "responses")


class AnthropicAdapter(BaseAdapter):
    """Messages."""

    paths = ("messages",)
