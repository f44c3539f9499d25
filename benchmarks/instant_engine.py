"""An engine that answers at once, to measure our side of a rollout: `python benchmarks/instant_engine.py [PREFIX]`.

Prints its port and serves /v1/completions, and PREFIX/health for a router. An answer has `max_tokens` tokens with
log-probs in vLLM's format, or one answer per sample of a group (vime.vllm.group_wire). Answers are made once per
length. The engine is for measurements only; unlike a test double, it cannot simulate failures.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from vime.vllm.group_wire import SAMPLES, SampleAnswer, frame


def completion(tokens: int) -> tuple[str, list[int], list[float]]:
    """Returns text, token ids and log-probs of an answer."""
    numbers = range(tokens)
    text = "".join(f" word{i % 1000}" for i in numbers)
    return text, [(i * 7919) % 50_000 for i in numbers], [-(1.2345678901234567 + i % 89 / 7) for i in numbers]


@lru_cache(8)
def sample(tokens: int) -> SampleAnswer:
    """Returns a sample's answer, with index 0."""
    text, token_ids, log_probs = completion(tokens)
    ids, values = np.array(token_ids, np.int32).tobytes(), np.array(log_probs, np.float32).tobytes()
    return SampleAnswer(0, ids, values, text, "length", [0], prompt_tokens=128)


def group(each: list[dict[str, Any]]) -> bytes:
    """Returns all samples' frames."""
    samples = ((place, sample(own["max_tokens"])) for place, own in enumerate(each))
    return b"".join(frame(msgspec.structs.replace(one, place=place)) for place, one in samples)


@lru_cache(8)
def answer(tokens: int) -> bytes:
    """Returns the body of a completion. Its numbers have the digits, and its words about the length, of real
    answers."""
    text, token_ids, log_probs = completion(tokens)
    choice = {
        "index": 0,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": "length",
        "logprobs": {"text_offset": [], "token_logprobs": log_probs, "tokens": [], "top_logprobs": []},
    }
    usage = {"prompt_tokens": 128, "completion_tokens": tokens, "total_tokens": 128 + tokens}
    body = {
        "id": "cmpl-0",
        "object": "text_completion",
        "model": "policy",
        "choices": [choice],
        "usage": usage,
    }
    return json.dumps(body).encode()


async def complete(request: web.Request) -> web.Response:
    body = await request.json()
    if SAMPLES in body:
        return web.Response(body=group(body[SAMPLES]["each"]))
    return web.Response(body=answer(int(body["max_tokens"])), content_type="application/json")


async def report_health(request: web.Request) -> web.Response:
    return web.Response()


async def serve(prefix: str) -> web.Application:
    app = web.Application()
    for start in {"", prefix}:
        app.router.add_post(f"{start}/v1/completions", complete)
        app.router.add_get(f"{start}/health", report_health)
    return app


def main() -> None:
    from vime.pool.process import free_port

    port = free_port("127.0.0.1")
    web.run_app(
        serve("".join(sys.argv[1:])),
        host="127.0.0.1",
        port=port,
        print=lambda text: print(port, flush=True),
        access_log=None,
    )


if __name__ == "__main__":
    main()
