"""An agent whose model may call a calculator before it answers: a loop over OpenAI's client in a session.

    PYTHONPATH=examples/calculator-tool vime train ... --custom-generate-function-path calculator.generate \
        --custom-rm-path calculator.score --vllm-tool-call-parser PARSER

The reward depends on the answer only, never on a call. PARSER is vLLM's tool-call parser for the model's family.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import operator
from typing import Any

import openai

from slime.sessions import Session, open_session
from slime.utils.types import Sample

TURNS = 3
"""Largest number of answers of the model: two with calls, and one without."""
TOOL_S = 2.0
"""Largest time for a call of the tool, in seconds."""
LONGEST = 40
"""Largest length of an expression, in characters. It limits the sizes of the syntax tree and of the value."""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "The value of an expression of whole numbers with +, - and *, such as 12+34.",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]},
    },
}
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """Returns the value of an expression of whole numbers with +, -, * and brackets. ValueError for any other text.

    A model writes the expression, so it is never executed. The function evaluates four kinds of nodes of the syntax
    tree. Powers and names are not among them, so the value has at most `LONGEST` digits.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression may have {LONGEST} characters, got {len(expression)}; shorten it")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"an expression has numbers, +, -, * and brackets, got {expression!r}") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"an expression has numbers, +, -, * and brackets, got {ast.unparse(node)!r}")


async def use_tool(name: str, arguments: str) -> str:
    """Returns the text that the model reads after a call. After a wrong call, this is an error to learn from."""
    try:
        given = json.loads(arguments)
        if name != "calc" or not isinstance(given, dict) or not isinstance(given.get("sum"), str):
            raise ValueError("call calc with a text named sum")
        return str(calculate(given["sum"]))
    except ValueError as error:
        return f"error: {error}"


@functools.cache
def connections(loop: asyncio.AbstractEventLoop) -> Any:
    """Returns the HTTP client that all samples in an event loop share. Its creation blocks the loop."""
    return openai.DefaultAsyncHttpxClient()


async def solve(session: Session, question: str) -> str:
    """Returns the model's last answer. "" if the model still calls after `TURNS` answers, or a tool takes too long."""
    messages: list[Any] = [{"role": "user", "content": question}]
    http = connections(asyncio.get_running_loop())
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model=session.model, messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                async with asyncio.timeout(TOOL_S):
                    result = await use_tool(call.function.name, call.function.arguments)
            except TimeoutError:
                session.end("tool", f"the calculator took more than {TOOL_S:g} s")
                return ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Returns a question's samples. The tokens of the tool have loss mask 0."""
    answer = ""
    async with open_session(args, sample, sampling_params) as session:
        answer = await solve(session, sample.prompt)
    made = session.samples()
    made[0].metadata["answer"] = answer
    return made


async def score(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """Returns 1 for the right answer, with or without a call of the tool."""
    right = samples[0].metadata["answer"].strip() == samples[0].label
    return [float(right)] * len(samples)
