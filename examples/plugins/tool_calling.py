"""A generate function with a tool, which posts to the run's router as slime's examples do.

    PYTHONPATH=examples/plugins vime train ... --custom-generate-function-path tool_calling.generate

The model writes an expression and "=". The function appends the calculator's result, and the model continues. The
tokens of the calculator are not trained on: their loss mask is 0.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 4
CALL = "="
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(text: str) -> str:
    """Returns the value of the expression at the end of `text`, or "error"."""
    expression = text[len(text.rstrip("0123456789+-*() ")) :].strip()

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(expression)

    try:
        return str(value(ast.parse(expression, mode="eval").body))[:20]
    except (ValueError, SyntaxError, RecursionError):
        return "error"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    tokenizer = state.tokenizer
    prompt_ids = state.prompt_ids(sample)
    tokens: list[int] = []
    text = ""
    mask: list[int] = []
    log_probs: list[float] = []
    sample.status = Sample.Status.TRUNCATED
    for _ in range(MAX_TURNS):
        budget = sampling_params["max_new_tokens"] - len(tokens)
        if budget <= 0:
            break
        payload = {
            "input_ids": prompt_ids + tokens,
            "sampling_params": {**sampling_params, "max_new_tokens": budget, "stop": [CALL]},
            "return_logprob": True,
        }
        answer = await post(url, payload, headers={"x-smg-routing-key": str(sample.session_id)})
        meta = answer["meta_info"]
        new = meta["output_token_logprobs"]
        tokens += [token for _, token, *_ in new]
        log_probs += [value for value, *_ in new]
        mask += [1] * len(new)
        text += answer["text"]
        if new:
            sample.weight_versions.append(meta["weight_version"])
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            sample.status = Sample.Status.ABORTED
            break
        if reason == "length":
            break
        if not text.endswith(CALL):
            sample.status = Sample.Status.COMPLETED
            break
        result = calculate(text.removesuffix(CALL))
        result_ids = tokenizer.encode(result, add_special_tokens=False)
        if len(tokens) + len(result_ids) > sampling_params["max_new_tokens"]:
            break
        tokens += result_ids
        log_probs += [0.0] * len(result_ids)
        mask += [0] * len(result_ids)
        text += result
        sample.metadata.setdefault("tool_results", []).append(result)
    sample.tokens = prompt_ids + tokens
    sample.response = text
    sample.response_length = len(tokens)
    sample.loss_mask = mask
    sample.rollout_log_probs = log_probs
    return sample
