"""Finds reasoning and tool calls in the model's text with vLLM's own parsers.

--vllm-tool-call-parser and --vllm-reasoning-parser name the parsers, as for vLLM's chat endpoint. The first session
that needs a parser imports vLLM.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, cast

from slime.config import Config
from slime.records.errors import FlagError
from slime.sessions.messages import ChatParser, PlainParser, Reply, ToolCall
from slime.types import Message, Tools
from vime.vllm.versions import quiet_import

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.parser.abstract_parser import Parser
    from vllm.tokenizers import TokenizerLike

_HARMONY = "openai_gptoss"
"""Name of the reasoning parser of gpt-oss. vLLM reads this model's text with a separate parser."""


def make_parser(config: Config, tokenizer: PreTrainedTokenizerBase) -> ChatParser:
    """Returns the parser that the flags name. If the flags name none, the whole text is the content.

    Raises ValueError for a name that vLLM does not have, and for a tokenizer that lacks the tokens of the format.
    """
    flags = config.engine.hook_args
    tools: str | None = flags.get("vllm_tool_call_parser")
    reasoning: str | None = flags.get("vllm_reasoning_parser")
    if not tools and not reasoning:
        return PlainParser()
    return VllmChatParser(tokenizer, tools, reasoning, dict(config.data.apply_chat_template_kwargs or {}))


def find_parser(tools: str | None, reasoning: str | None) -> type[Parser]:
    """Returns vLLM's class of the parsers with these names. Raises ValueError for a name that vLLM does not have."""
    with quiet_import():
        from vllm.parser import ParserManager
    try:
        made = ParserManager.get_parser(
            tool_parser_name=tools,
            reasoning_parser_name=reasoning,
            enable_auto_tools=True,
            is_harmony=reasoning == _HARMONY,
        )
    except Exception as error:  # border: vLLM raises a different error for each registry
        raise _unfit(tools, reasoning, error) from error
    assert made is not None
    return made


def _unfit(tools: str | None, reasoning: str | None, error: Exception) -> FlagError:
    return FlagError(
        "--vllm-tool-call-parser and --vllm-reasoning-parser",
        "fit the model's tokenizer",
        f"{tools} and {reasoning}: {error}",
        "take the names that vLLM has for the family of the model",
    )


class VllmChatParser:
    """Implements `slime.sessions.messages.ChatParser` with vLLM's parsers."""

    plain = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: str | None,
        reasoning: str | None,
        template_kwargs: dict[str, object],
    ) -> None:
        with quiet_import():
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        # Imported here, because the import takes seconds and must not delay the first answer.
        self._request = ChatCompletionRequest
        self._tokenizer, self._kwargs = tokenizer, template_kwargs
        self.tools = tools is not None
        self._class = find_parser(tools, reasoning)
        try:
            self._new([])
        except Exception as error:  # border: each parser of vLLM checks the tokenizer in its own way
            raise _unfit(tools, reasoning, error) from error

    def _new(self, tools: Tools) -> Parser:
        """Returns a new parser. A parser keeps the text that it has read, so each answer gets its own parser."""
        # vLLM's protocol of tokenizers is narrower than transformers' class, which its own server passes
        tokenizer = cast("TokenizerLike", self._tokenizer)
        return self._class(tokenizer, tools, chat_template_kwargs=self._kwargs)

    def parse(
        self, text: str, token_ids: list[int], prompt_ids: list[int], messages: list[Message], tools: Tools
    ) -> Reply:
        """Returns the reply that vLLM's chat endpoint would send."""
        body = {"messages": [{"role": "user", "content": ""}], "tools": tools or None}
        request = self._request.model_validate(body)
        parser = self._new(request.tools or [])
        if hasattr(parser, "set_prompt_token_ids"):
            parser.set_prompt_token_ids(prompt_ids)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        made = tuple(
            ToolCall(call.name, _text(call.arguments), call.id or f"call_{secrets.token_hex(12)}")
            for call in calls or ()
        )
        return Reply(content, reasoning or None, made)


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
