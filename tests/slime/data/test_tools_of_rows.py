"""The tools of a row may be objects, their JSON texts and names; any other value is an error with its line."""

from __future__ import annotations

import json

import pytest
from rollout_double import make_tokenizer, write_lines

from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns, render_chat

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "tools", [[ADD], json.dumps([ADD]), [json.dumps(ADD)], json.dumps([json.dumps(ADD)])], ids=str
)
def test_a_tool_is_the_same_as_an_object_and_as_json_text(tmp_path, tools):
    """Files whose tools have different fields store a column of texts."""
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "hi", "tools": tools}])
    columns = RowColumns("prompt", apply_chat_template=True)
    (prompt,) = load_prompts(path, columns, tokenizer=make_tokenizer("{{ tools | tojson }}"))
    assert json.loads(prompt.text) == prompt.metadata["tools"] == [ADD]


def test_a_tool_may_be_a_name(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "hi", "tools": ["maths.add", "web-search"]}])
    columns = RowColumns("prompt", apply_chat_template=True)
    (prompt,) = load_prompts(path, columns, tokenizer=make_tokenizer("{{ tools | tojson }}"))
    assert [tool["function"]["name"] for tool in json.loads(prompt.text)] == ["maths.add", "web-search"]


@pytest.mark.parametrize("tool", ['{"name": "add"', "[]", '"{}"', "two words", "", 5, None, [ADD]], ids=repr)
def test_a_tool_of_another_kind_is_an_error_with_its_line(tmp_path, tool):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "hi", "tools": [tool]}])
    with pytest.raises(
        ValueError, match=r"d.jsonl:2: each tool of column 'tools' must be an object, the JSON"
    ):
        load_prompts(path, RowColumns("prompt"))


@pytest.mark.parametrize(
    ("tool", "rule"),
    [
        ({}, "have a name that is a text, got {}"),
        ({"name": 5}, "have a name that is a text, got {'name': 5}"),
        ({"name": ""}, "have a name that is a text"),
        ({"type": "function", "function": {}}, "have a name that is a text"),
        ({"type": "function", "function": {"name": None}}, "have a name that is a text"),
        ({"type": "function", "function": "add"}, "have a function that is an object"),
        ({"name": "add", "description": 5}, "have a description that is a text"),
        ({"name": "add", "parameters": []}, "have parameters that are an object"),
        ({"function": {"name": "add", "parameters": "a"}}, "have parameters that are an object"),
        (
            {"name": "add", "parameters": {"properties": ["a"]}},
            "have properties of parameters that are an object",
        ),
        ('{"name": 5}', "have a name that is a text"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("template", [True, False])
def test_an_object_that_is_no_tool_is_an_error_with_its_line(tmp_path, tool, rule, template):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "hi", "tools": [ADD, tool]}])
    columns, tokenizer = (
        RowColumns("prompt", apply_chat_template=template),
        make_tokenizer("{{ tools | tojson }}"),
    )
    with pytest.raises(ValueError) as error:
        load_prompts(path, columns, tokenizer=tokenizer)
    assert f"d.jsonl:2: each tool of column 'tools' must {rule}" in str(error.value)


@pytest.mark.parametrize("tools", [{}, 0, False, {"name": "add"}, "add"], ids=repr)
def test_tools_that_are_no_list_are_an_error_with_their_line(tmp_path, tools):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "a", "tools": []}, {"prompt": "hi", "tools": tools}])
    with pytest.raises(ValueError, match=r"d.jsonl:2: column 'tools' must be (a list|JSON), got "):
        load_prompts(path, RowColumns("prompt"))


def test_null_fields_of_a_tool_count_as_absent(tmp_path):
    """Parquet gives each tool the union of the fields."""
    tool = {"name": "add", "description": None, "parameters": {"type": "object", "properties": None}}
    tools = [{**tool, "function": None}, {"type": "function", "function": tool, "name": None}]
    path = write_lines(
        tmp_path / "d.jsonl", [{"prompt": "hi", "tools": tools}, {"prompt": "a", "tools": None}]
    )
    first, second = load_prompts(path, RowColumns("prompt"))
    assert len(first.metadata["tools"]) == 2 and "tools" not in second.metadata


@pytest.mark.parametrize(
    ("tools", "rule"),
    [({"name": "add"}, "tools must be a list"), ([{"name": 5}], "a tool must have a name that is a text")],
)
def test_tools_of_a_hook_are_checked_before_the_template_reads_them(tools, rule):
    """A hook may set tools in the metadata of a sample."""
    with pytest.raises(ValueError, match=rule):
        render_chat([{"role": "user", "content": "hi"}], make_tokenizer("{{ tools | tojson }}"), {}, tools)
