"""vLLM's own parsers parse the model's text, and names that do not fit are errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rollout_double import make_args, make_state, make_tokenizer

from slime.agent.parsing import parse_model_output, parse_tool_uses
from slime.config import Config
from slime.sessions.json_text import as_object, read_json
from slime.sessions.messages import PlainParser, Reply, RequestRejected
from slime.sessions.parsing import parse_reply
from vime.vllm.chat_parser import make_parser

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def parse(text: str, tools: Any, **names: str) -> Reply:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    config = Config.from_flat({"hook_args": {f"vllm_{name}": value for name, value in names.items()}})
    ids = tokenizer.encode(text, add_special_tokens=False)
    return make_parser(config, tokenizer).parse(text, ids, [1], [], tools)


def test_calls_and_reasoning_are_found() -> None:
    both = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    found = parse(f"<think>\nhm\n</think>\n\nso\n{CALL}", TOOLS, **both)
    (call,) = found.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 1}') and call.id
    assert (found.content or "").strip() == "so" and (found.reasoning or "").strip() == "hm"
    assert parse("so", TOOLS, tool_call_parser="hermes") == Reply("so")
    assert parse(CALL, [], reasoning_parser="qwen3").tool_calls == ()


def test_without_names_the_text_is_the_content() -> None:
    made = make_parser(Config.from_flat({}), make_tokenizer())
    assert isinstance(made, PlainParser) and not made.tools
    assert made.parse(CALL, [], [], [], TOOLS) == Reply(CALL)


def test_names_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="--vllm-tool-call-parser and --vllm-reasoning-parser must fit"):
        parse("x", TOOLS, tool_call_parser="nope")


BRACKETS = "[" * 1_200
DEEP = (BRACKETS, BRACKETS + "]" * 1_200, '{"a":' * 1_200, "-" * 1_200 + "1", "9" * 5_000, '"\\ud800"', "NaN")
CALLS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    '<tool_call>\n{"name": "add", "arguments": {"a": %s}}\n</tool_call>',
    '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>',
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": %s}}]',
    '[TOOL_CALLS]add[ARGS]{"a": %s}',
    "[add(a=%s)]",
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">%s</parameter>\n</invoke>\n</minimax:tool_call>',
    '<|tool_call|>[{"name": "add", "arguments": {"a": %s}}]',
    '<|action_start|><|plugin|>{"name": "add", "arguments": {"a": %s}}<|action_end|>',
    "<seed:tool_call><function=add><parameter=a>%s</parameter></function></seed:tool_call>",
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": %s}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">%s'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
)
"""Formats of the parsers in which a model can write JSON or Python."""
MARKS = re.compile(r"<\|[^|>]*\|>|</?(?:seed|minimax|think)[:\w]*>|</?tool_call>|\[[A-Z_]+\]")
OBJECTS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "object"}}}}}
]


def outcomes(name: str) -> set[str]:
    """Returns the results of the answers above: "call", "text" or "refused". Any other error is a failure."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(sorted({mark for call in CALLS for mark in MARKS.findall(call)}))
    parser = make_parser(Config.from_flat({"hook_args": {"vllm_tool_call_parser": name}}), tokenizer)
    found = set()
    for text in (call.replace("%s", value) for call in CALLS for value in DEEP):
        ids = tokenizer.encode(text, add_special_tokens=False)
        try:
            reply = parse_reply(parser, text, ids, [1], [], OBJECTS)
        except RequestRejected as refusal:
            assert refusal.reason == "parser"
            found.add("refused")
            continue
        found.add("call" if reply.tool_calls else "text")
        for call in reply.tool_calls:
            json.dumps(read_json(json.dumps(as_object(call.arguments))))
            "".join((call.name, call.arguments, call.id, reply.content or "")).encode()
    return found


@pytest.mark.parametrize("name", ["qwen3_coder", "mistral", "hermes"])
def test_an_answer_of_brackets_ends_as_a_call_a_text_or_a_refusal(name: str) -> None:
    assert {"call", "text"} <= outcomes(name) <= {"call", "text", "refused"}


@pytest.mark.slow
def test_so_does_it_with_each_parser_of_vllm() -> None:
    from vllm.tool_parsers import ToolParserManager

    made = {}
    for name in ToolParserManager.list_registered():
        try:
            made[name] = outcomes(name)
        except ValueError as error:  # this parser needs a tokenizer with its own tokens
            assert "must fit the model's tokenizer" in str(error)
    assert len(made) > 40 and sum("refused" in found for found in made.values()) > 10
    assert sum("call" in found for found in made.values()) > 20


def test_a_plug_in_names_a_parser_for_one_answer() -> None:
    """Without a tokenizer, the run's tokenizer is used."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    body, (call,), ill_formed = parse_tool_uses(f"x{CALL}", TOOLS, "hermes", tokenizer)
    assert (body, call["name"], call["input"], ill_formed) == ("x", "add", {"a": 1}, False)
    state = make_state(make_args(), tokenizer)
    names: dict[str, Any] = {"tool_parser_name": "hermes", "reasoning_parser_name": "qwen3"}
    found = parse_model_output(f"<think>\nhm\n</think>\n\nso\n{CALL}", tools_schema=TOOLS, **names)
    assert (found.reasoning.strip(), found.text, len(found.tool_uses)) == ("hm", "so", 1)
    wrong = parse_model_output(CALL.replace('{"a": 1}', "[1]"), tools_schema=TOOLS, **names)
    assert wrong.ill_formed and wrong.tool_uses[0]["input"] == {"_raw_arguments": "[1]"}
    state.close()
    with pytest.raises(ValueError, match="--vllm-tool-call-parser"):
        parse_tool_uses("x", TOOLS, "no-such-parser", tokenizer)
