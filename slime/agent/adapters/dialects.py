"""Which paths each adapter serves. What the bodies mean is the sessions' affair."""

from __future__ import annotations

from slime.agent.adapters.common import BaseAdapter


class OpenAIAdapter(BaseAdapter):
    """Chat completions and Responses."""

    paths = ("chat/completions", "responses")


class ResponsesAdapter(BaseAdapter):
    """Responses alone."""

    paths = ("responses",)


class AnthropicAdapter(BaseAdapter):
    """Messages, and how many tokens they have."""

    paths = ("messages", "messages/count_tokens")
