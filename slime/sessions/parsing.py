"""Calls the parser of the model's text and checks the parsed answers. A parser's error ends the session."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from slime.protocols import GenerateResult
from slime.sessions.json_text import as_unicode
from slime.sessions.messages import ChatParser, ChatRequest, Reply, RequestRejected, ToolCall
from slime.sessions.off_loop import within
from slime.types import Message, Tools

if TYPE_CHECKING:
    from slime.rollout.state import GenerateState

_LONGEST_S = 60.0
"""Limit on the parser's time in seconds. The time of some parsers grows with the square of the text's length."""


Answer: TypeAlias = tuple[str, list[int], list[int], list[Message], Tools]
"""The arguments of `ChatParser.parse`: text, its ids, the prompt's ids, the messages and the tools."""


async def read_reply(
    parser: ChatParser,
    state: GenerateState,
    request: ChatRequest,
    prompt: list[int],
    result: GenerateResult,
    *,
    ended: bool,
) -> tuple[Reply, RequestRejected | None]:
    """Returns the parsed answer and None, or the plain text and an error if the parser fails. `ended` is true if the
    last token ended the turn, so that the token is not part of the text."""
    ids = result.token_ids[:-1] if ended else result.token_ids
    text = str(state.tokenizer.decode(ids, skip_special_tokens=False))
    for stop in request.stop:
        text = text.removesuffix(stop)
    try:
        return await parsed(parser, (text, result.token_ids, prompt, request.messages, request.tools)), None
    except RequestRejected as refusal:
        return Reply(text), refusal


async def parsed(parser: ChatParser, answer: Answer) -> Reply:
    """Calls `parse_reply` in a thread, so that the event loop is not blocked. Also raises RequestRejected if the parser
    takes too long."""
    if getattr(parser, "plain", False):
        return parse_reply(parser, *answer)
    try:
        return await within(_LONGEST_S, parse_reply, parser, *answer)
    except TimeoutError as error:
        text = answer[0]
        raise RequestRejected(
            "parser",
            f"the parser must read an answer in {_LONGEST_S:g} s, got no end for {len(text)} characters, {text!r:.80}; "
            "check the parsers that the flags of the engine's backend name",
            403,
        ) from error


def parse_reply(parser: ChatParser, *answer: *Answer) -> Reply:
    """Returns the parsed answer as valid Unicode. Raises RequestRejected if the parser raises an error, or returns a
    call without a name, which no client could answer."""
    try:
        found = parser.parse(*answer)
        calls = tuple(_call(call) for call in found.tool_calls)
        content, reasoning = (
            None if part is None else as_unicode(part) for part in (found.content, found.reasoning)
        )
        return replace(found, content=content, reasoning=reasoning, tool_calls=calls)
    except Exception as error:  # border: parsers belong to other projects, and the model wrote the text
        raise RequestRejected(
            "parser",
            f"the answer must be one that the parser can read, got {type(error).__name__}: {error!s:.200} for "
            f"{answer[0]!r:.80}; check the parsers that the flags of the engine's backend name",
            403,
        ) from error


def _call(call: ToolCall) -> ToolCall:
    if not call.name:
        raise ValueError("a tool call must have a name, got none; change the prompt or the parser")
    return ToolCall(as_unicode(call.name), as_unicode(call.arguments), as_unicode(call.id))
