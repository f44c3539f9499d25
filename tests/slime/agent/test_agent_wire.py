"""Tests the functions on contents, answers and environment variables that slime's plug-ins use."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from slime.agent.adapters.common import (
    flatten_content,
    manager_finish_reason,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.parsing import parse_model_output, parse_xml_tool_uses
from slime.agent.settings import extra_environment, setting

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
XML = "so <tool_call>\n<function=add><parameter=a> 1 </parameter></function></tool_call> done"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ({"a": 1}, "{'a': 1}"),
        (5, "5"),
        ([], ""),
        (["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": ""}, 3], "a\nb\n3"),
        ([{"type": "tool_result", "content": [{"type": "output_text", "text": "c"}]}], "c"),
        ([{"type": "image_url"}, {"type": "other", "text": "d"}], "[image omitted]\nd"),
        ([{"type": "other", "content": "e"}, {"type": "text", "text": None}, {"type": "other"}], "e"),
    ],
)
def test_the_text_of_contents(content, text):
    assert flatten_content(content) == text


def test_calls_reasons_and_names_of_sessions():
    assert tool_call_dict("add", None) == {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert [manager_finish_reason(uses, raw) for uses, raw in (([{}], "stop"), ([], "length"), ([], ""))] == [
        *("tool_calls", "length", "stop")
    ]
    headers = ({"Authorization": "bearer  key "}, {"Authorization": "Basic x"}, {})
    found = [sid_from_bearer(make_mocked_request("POST", "/", headers=each)) for each in headers]
    assert found == ["key", None, None]
    bodies = ({"metadata": {"session_id": 3}, "user": "u"}, {"metadata": None, "user": "u"}, {}, None)
    assert [sid_from_body(body) for body in bodies] == ["3", "u", None, None]


def test_tool_calls_in_xml():
    text, calls = parse_xml_tool_uses(XML, TOOLS)
    assert text == "so  done"
    assert calls == [
        {"name": "add", "input": {"a": "1"}, "raw_arguments": '{"a": "1"}', "arguments_valid": True}
    ]
    other = XML.replace("add", "sub")
    assert parse_xml_tool_uses(other, TOOLS) == (other, [])
    found = parse_model_output(XML, tools_schema=TOOLS, tool_parser_name=None, reasoning_parser_name=None)
    assert (found.text, len(found.tool_uses), found.ill_formed) == ("so  done", 1, False)
    plain = parse_model_output(XML, tools_schema=None, tool_parser_name=None, reasoning_parser_name=None)
    assert plain.text == XML and plain.tool_uses == []


def test_settings_of_agents(monkeypatch):
    assert setting("CC_TARBALL") is None and extra_environment("CC_EXTRA_ENVS") == {}
    monkeypatch.setenv("SWE_HOST_CC_TARBALL", "old.tgz")
    assert setting("CC_TARBALL") == "old.tgz"
    monkeypatch.setenv("VIME_AGENT_CC_TARBALL", "new.tgz")
    monkeypatch.setenv("SLIME_AGENT_CC_TARBALL", "")
    assert setting("CC_TARBALL") == "new.tgz"
    monkeypatch.setenv("VIME_AGENT_CC_EXTRA_ENVS", '{"MAX_THINKING_TOKENS": 4096}')
    assert extra_environment("CC_EXTRA_ENVS") == {"MAX_THINKING_TOKENS": "4096"}
    for wrong in ("[1]", "{"):
        monkeypatch.setenv("VIME_AGENT_CC_EXTRA_ENVS", wrong)
        with pytest.raises(ValueError, match="CC_EXTRA_ENVS must be a JSON object"):
            extra_environment("CC_EXTRA_ENVS")
