"""Parses the text of an answer into reasoning, visible text and tool calls, for plug-ins that send requests to the
engine themselves. Sessions parse their answers without this module."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from slime.hooks import load_function
from slime.types import Json, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PARSER = "vime.vllm.chat_parser.VllmChatParser"
_STATE = "slime.rollout.state.current_state"
"""Paths, because the engine's project and the rollout import this package."""
_CALL = re.compile(r"<tool_call>\s*<function=([^>]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


class ToolUse(TypedDict):
    """A tool call of the model."""

    name: str
    input: dict[str, Json]
    """The arguments. If they are no JSON object, {"_raw_arguments": TEXT}."""
    raw_arguments: str
    arguments_valid: bool


@dataclass(frozen=True)
class ParsedModelOutput:
    """A parsed answer. `ill_formed` is True if the arguments of a call are no JSON object, or if the parser fails."""

    reasoning: str
    text: str
    tool_uses: list[ToolUse] = field(default_factory=list)
    ill_formed: bool = False


def parse_model_output(
    raw_output: str,
    *,
    tools_schema: Tools | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> ParsedModelOutput:
    """Returns the parts of an answer. The names are those of vLLM's parsers. Without a name, only tool calls in XML
    (`parse_xml_tool_uses`) are found, and reasoning is not.

    `tools_schema` has the request's tools in OpenAI's form. Without tools there are no calls. `tokenizer` defaults to
    the tokenizer of the run in this process.
    """
    schema = tools_schema or []
    reasoning, body, calls, ill_formed = "", raw_output, list[ToolUse](), False
    if reasoning_parser_name or (tool_parser_name and schema):
        found = _engine_parsed(raw_output, schema, tool_parser_name, reasoning_parser_name, tokenizer)
        reasoning, body, calls, ill_formed = found.reasoning, found.text, found.tool_uses, found.ill_formed
    if schema and not calls:
        body, calls = parse_xml_tool_uses(body, schema)
    return ParsedModelOutput(reasoning, body.strip(), calls, ill_formed)


def parse_tool_uses(
    body_text: str,
    tools_schema: Tools | None,
    tool_parser_name: str | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[str, list[ToolUse], bool]:
    """Returns the text without its tool calls, the calls, and `ill_formed`. See `parse_model_output`."""
    found = parse_model_output(
        body_text,
        tools_schema=tools_schema,
        tool_parser_name=tool_parser_name,
        reasoning_parser_name=None,
        tokenizer=tokenizer,
    )
    return found.text, found.tool_uses, found.ill_formed


def parse_xml_tool_uses(body_text: str, tools_schema: Tools) -> tuple[str, list[ToolUse]]:
    """Returns the text without its tool calls, and the calls.

    A call is `<tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>`. A call of a tool that
    the request does not have stays in the text.
    """
    names = {tool["function"]["name"] for tool in tools_schema}
    calls = []

    def take(match: re.Match[str]) -> str:
        if match[1] not in names:
            return match[0]
        arguments: dict[str, Json] = {key: text.strip() for key, text in _PARAMETER.findall(match[2])}
        calls.append(
            ToolUse(name=match[1], input=arguments, raw_arguments=json.dumps(arguments), arguments_valid=True)
        )
        return ""

    return _CALL.sub(take, body_text), calls


def _engine_parsed(
    text: str,
    schema: Sequence[object],
    tool_parser: str | None,
    reasoning_parser: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> ParsedModelOutput:
    tokenizer = load_function(_STATE)().tokenizer if tokenizer is None else tokenizer
    parser = load_function(_PARSER)(tokenizer, tool_parser, reasoning_parser, {})
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    try:
        reply = parser.parse(text, ids, [], [], list(schema))
    except Exception as error:  # border: parsers are programs of others, and the model wrote the text
        logger.warning("the parser cannot read an answer of %d characters: %s", len(text), error)
        return ParsedModelOutput("", text, [], ill_formed=True)
    calls = [_tool_use(call.name, call.arguments) for call in reply.tool_calls]
    valid = all(call["arguments_valid"] for call in calls)
    return ParsedModelOutput(reply.reasoning or "", reply.content or "", calls, not valid)


def _tool_use(name: str, raw: str) -> ToolUse:
    try:
        found: Json = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    valid = isinstance(found, dict)
    arguments: dict[str, Json] = found if isinstance(found, dict) else {"_raw_arguments": raw}
    return ToolUse(name=name, input=arguments, raw_arguments=raw, arguments_valid=valid)
