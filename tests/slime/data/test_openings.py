"""Tests warnings about prompts that a chat template spoils without an error."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_double import CHATML, make_tokenizer, write_lines

from slime.data.openings import ChatTemplate
from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns

DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}" + CHATML
)
PLAIN = "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}Assistant:"
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("template", "text", "opening"),
    [
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        (CHATML, "\n<|im_start|>system\nshort<|im_end|>", "<|im_start|>"),
        (DEFAULT_SYSTEM, "<|im_start|>user\nhi", "<|im_start|>"),
        (NO_SYSTEM, "<|im_start|>user\nhi", "<|im_start|>"),
        (PLAIN, "User: hi\nAssistant:", "User:"),
        (PLAIN, "System: be short\nUser: hi\nAssistant:", "System:"),
        (CHATML, "hi <|im_start|>", None),
        (PLAIN, "who is the user?", None),
        (BARE, "hi", None),
        (None, "hi", None),
    ],
)
def test_a_text_that_begins_as_the_template_does(
    template: str | None, text: str, opening: str | None
) -> None:
    assert ChatTemplate(make_tokenizer(template), {}).doubled([text]) == opening


@pytest.mark.parametrize(
    ("template", "reads"), [(TOOLS, True), (CHATML, False), (PLAIN, False), (None, True)]
)
def test_a_template_that_reads_tools(template: str | None, reads: bool) -> None:
    assert ChatTemplate(make_tokenizer(template), {}).reads_tools is reads


RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def warnings_of(
    tmp_path: Any, caplog: Any, rows: list[Any], template: str = CHATML, **columns: Any
) -> list[str]:
    path = write_lines(tmp_path / "d.jsonl", rows)
    caplog.clear()
    load_prompts(path, RowColumns("prompt", **columns), tokenizer=make_tokenizer(template))
    return caplog.messages


def test_a_file_of_rendered_prompts_is_named_once(tmp_path: Any, caplog: Any) -> None:
    rows = [{"prompt": "hi"}, {"prompt": RENDERED}, {"prompt": RENDERED}]
    (said,) = warnings_of(tmp_path, caplog, rows, apply_chat_template=True)
    assert "d.jsonl:2: the prompt begins with '<|im_start|>', and so does the chat template" in said
    assert "leave --apply-chat-template off" in said
    assert warnings_of(tmp_path, caplog, rows) == []
    assert warnings_of(tmp_path, caplog, rows[:1], apply_chat_template=True) == []
    messages = [{"prompt": [{"role": "user", "content": RENDERED}]}]
    # Messages are rendered before an engine gets them.
    assert len(warnings_of(tmp_path, caplog, messages)) == 1


def test_tools_that_no_one_reads(tmp_path: Any, caplog: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "tools": [ADD]}]
    (said,) = warnings_of(tmp_path, caplog, rows, apply_chat_template=True)
    assert "d.jsonl:1: the prompt has 1 tools, and the chat template does not read tools" in said
    assert warnings_of(tmp_path, caplog, rows, TOOLS, apply_chat_template=True) == []
    assert warnings_of(tmp_path, caplog, [rows[0] | {"prompt": "hi"}]) == []  # a raw text has no template
