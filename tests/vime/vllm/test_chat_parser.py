"""vLLM's own parsers take the model's text apart, and names that do not fit are errors."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from rollout_double import make_tokenizer

from slime.sessions.messages import PlainParser, Reply
from vime.vllm.chat_parser import make_parser

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def parse(text: str, tools: Any, **names: str) -> Reply:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    args = Namespace(
        apply_chat_template_kwargs={}, **{f"vllm_{name}": value for name, value in names.items()}
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return make_parser(args, tokenizer).parse(text, ids, [1], [], tools)


def test_calls_and_reasoning_are_found() -> None:
    both = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    found = parse(f"<think>\nhm\n</think>\n\nso\n{CALL}", TOOLS, **both)
    (call,) = found.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 1}') and call.id
    assert (found.content or "").strip() == "so" and (found.reasoning or "").strip() == "hm"
    assert parse("so", TOOLS, tool_call_parser="hermes") == Reply("so")
    assert parse(CALL, [], reasoning_parser="qwen3").tool_calls == ()


def test_without_names_the_text_is_the_content() -> None:
    made = make_parser(Namespace(apply_chat_template_kwargs={}), make_tokenizer())
    assert isinstance(made, PlainParser) and not made.tools
    assert made.parse(CALL, [], [], [], TOOLS) == Reply(CALL)


def test_names_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="--vllm-tool-call-parser and --vllm-reasoning-parser must fit"):
        parse("x", TOOLS, tool_call_parser="nope")
