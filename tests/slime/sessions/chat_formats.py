"""Provides the chat formats of five families: a template in the project's own words, and the same format a second
time in Python.

The facts are those of the templates that the models are published with: Qwen3 (Qwen/Qwen3-8B), GLM-4.5
(zai-org/GLM-4.5), Llama 3.1 (meta-llama/Llama-3.1-8B-Instruct), SmolLM2 (HuggingFaceTB/SmolLM2-135M-Instruct) and
gpt-oss (openai/gpt-oss-20b). TRL ships four of these templates; if it is installed, the drift test uses them too.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QWEN3 = """\
{%- set ns = namespace(query=messages | length - 1, open=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.open and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.open = false %}{%- set ns.query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (first + '\\n\\n' if first else '') + 'Tools:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif first %}{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if m.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\nTools:' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- '<|system|>\\n' + m.content }}
    {%- elif m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think>' + (m.reasoning_content or '' if loop.index0 > ns.user else '') + '</think>' }}
        {{- '\\n' + m.content.strip() if m.content.strip() }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}{{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

LLAMA3 = """\
{%- macro turn(role, text) %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + text + '<|eot_id|>' }}
{%- endmacro %}
{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- turn('system', ('Environment: ipython\\n' if tools else '') + system) }}
{%- for m in rest %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- turn('assistant', '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}') }}
    {%- elif m.role == 'tool' %}{{- turn('ipython', m.content | tojson) }}
    {%- elif loop.first and tools %}
        {{- turn(m.role, 'Functions:\\n' + (tools | tojson(indent=4)) + '\\n\\n' + m.content | trim) }}
    {%- else %}{{- turn(m.role, m.content | trim) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

SMOLLM2 = """\
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GPT_OSS = """\
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|start|>developer<|message|>' + system + (tools | tojson if tools else '') + '<|end|>' }}
{%- endif %}
{%- set ns = namespace(tool=none) %}
{%- for m in messages[1 if messages[0].role == 'system' else 0:] %}
    {%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif 'tool_calls' in m %}
        {%- set call = m.tool_calls[0].function %}{%- set ns.tool = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- elif m.role == 'tool' %}
        {%- if ns.tool is none %}{{- raise_exception('no call') }}{%- endif %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson }}{{- '<|end|>' }}
    {%- else %}
        {%- set end = '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + end }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


@dataclass(frozen=True)
class Format:
    """The text that a family's template writes between two turns of the model, computed without the template."""

    name: str
    template: str
    special: tuple[str, ...]
    eos: str
    opening: str
    """Opening of the model's turn."""
    user: Callable[[str], str]
    results: Callable[[list[str]], str]
    """Text for the tools' results in one turn."""
    answer: Callable[[str, str, list[dict[str, object]]], str]
    """Text that the model writes for a thought, a content and calls, without its end."""
    ends: tuple[str, ...]
    """Texts with which the model may end an answer."""
    call_ends: tuple[str, ...]
    closing: tuple[str, str]
    """Text that the template adds after a turn that was cut off: an answer, a call."""
    glue: str = ""
    """Text that the template adds after a turn that the model ended."""
    tools: bool = True
    calls: int = 2
    """Largest number of calls in a turn."""
    published: str = ""
    """The file of this template in TRL."""


def _call(call: dict[str, object], arguments: str) -> str:
    return f'{{"name": "{call["name"]}", "{arguments}": {json.dumps(call["arguments"])}}}'


def _chatml(name: str, template: str, *, tools: bool, published: str = "") -> Format:
    def results(said: list[str]) -> str:
        found = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in said)
        return f"<|im_start|>user{found}<|im_end|>\n"

    def answer(thought: str, content: str, calls: list[dict[str, object]]) -> str:
        found = "".join(f"\n<tool_call>\n{_call(c, 'arguments')}\n</tool_call>" for c in calls)
        return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + content + found

    return Format(
        name,
        template,
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        "<|im_end|>",
        "<|im_start|>assistant\n",
        lambda text: f"<|im_start|>user\n{text}<|im_end|>\n",
        results,
        answer,
        ends=("<|im_end|>",),
        call_ends=("<|im_end|>",),
        closing=("<|im_end|>\n", "<|im_end|>\n"),
        glue="\n",
        tools=tools,
        published=published,
    )


def _glm_answer(thought: str, content: str, calls: list[dict[str, object]]) -> str:
    found = f"\n<think>{thought}</think>" + (f"\n{content}" if content else "")
    for call in calls:
        found += f"\n<tool_call>{call['name']}"
        for key, value in dict(call["arguments"]).items():  # type: ignore[call-overload]
            found += f"\n<arg_key>{key}</arg_key>\n<arg_value>{json.dumps(value)}</arg_value>"
        found += "\n</tool_call>"
    return found


def _harmony_answer(thought: str, content: str, calls: list[dict[str, object]]) -> str:
    found = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    if calls:
        head = f" to=functions.{calls[0]['name']}<|channel|>commentary json<|message|>"
        return found + head + json.dumps(calls[0]["arguments"])
    return f"{found}<|channel|>final<|message|>{content}"


FORMATS = (
    _chatml("qwen3", QWEN3, tools=True, published="qwen3"),
    _chatml("smollm2", SMOLLM2, tools=False),
    Format(
        "glm-4.5",
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        "<|endoftext|>",
        "<|assistant|>",
        lambda text: f"<|user|>\n{text}",
        lambda said: "<|observation|>" + "".join(f"\n<tool_response>\n{x}\n</tool_response>" for x in said),
        _glm_answer,
        ends=("<|user|>", "<|endoftext|>"),
        call_ends=("<|observation|>",),
        closing=("", ""),
        published="glm4moe",
    ),
    Format(
        "llama-3",
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        lambda text: f"<|start_header_id|>user<|end_header_id|>\n\n{text.strip()}<|eot_id|>",
        lambda said: "".join(
            f"<|start_header_id|>ipython<|end_header_id|>\n\n{json.dumps(x, ensure_ascii=False)}<|eot_id|>"
            for x in said
        ),
        lambda thought, content, calls: _call(calls[0], "parameters") if calls else content,
        ends=("<|eot_id|>",),
        call_ends=("<|eot_id|>",),
        closing=("<|eot_id|>", "<|eot_id|>"),
        calls=1,
        published="llama3_1",
    ),
    Format(
        "gpt-oss",
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        "<|return|>",
        "<|start|>assistant",
        lambda text: f"<|start|>user<|message|>{text}<|end|>",
        lambda said: "".join(
            "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
            f"{json.dumps(x, ensure_ascii=False)}<|end|>"
            for x in said
        ),
        _harmony_answer,
        ends=("<|return|>", "<|end|>"),
        call_ends=("<|call|>",),
        closing=("<|end|>", "<|call|>"),
        calls=1,
        published="gptoss",
    ),
)


def published(name: str) -> str | None:
    """Returns a template of an installed TRL."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent / "chat_templates" / f"{name}.jinja"
    return file.read_text() if name and file.is_file() else None
