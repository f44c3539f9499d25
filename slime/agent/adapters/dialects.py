"""Defines the paths that each adapter serves. The sessions parse the bodies."""

from __future__ import annotations

from slime.agent.adapters.common import BaseAdapter


class OpenAIAdapter(BaseAdapter):
    """Chat completions and Responses."""

    paths = ("chat/completions", "responses")


class ResponsesAdapter(BaseAdapter):
    """Only Responses."""

    paths = ("responses",)


class AnthropicAdapter(BaseAdapter):
    """Messages, and their number of tokens."""

    paths = ("messages", "messages/count_tokens")
