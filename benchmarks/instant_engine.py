"""An engine that answers at once, to measure our side of a rollout: `python benchmarks/instant_engine.py`.

Prints its port and serves vLLM's /v1/completions: an answer of `max_tokens` tokens with log-probs as our engines give
them (vime.engine.compact_log_probs), made once for each length. A measuring instrument, not a test double: nothing in
it can be told to fail.
"""

from __future__ import annotations

import json
from functools import lru_cache

from aiohttp import web

from vime.engine.middleware import VERSIONS_HEADER


@lru_cache(8)
def answer(tokens: int) -> bytes:
    """The body of a completion: figures with as many digits, and words about as long, as real ones."""
    choice = {
        "index": 0,
        "text": "".join(f" word{i % 1000}" for i in range(tokens)),
        "token_ids": [(i * 7919) % 50_000 for i in range(tokens)],
        "finish_reason": "length",
        "logprobs": {
            "text_offset": [],
            "token_logprobs": [-(1.2345678901234567 + i % 89 / 7) for i in range(tokens)],
            "tokens": [],
            "top_logprobs": [],
        },
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
    tokens = int((await request.json())["max_tokens"])
    return web.Response(body=answer(tokens), content_type="application/json", headers={VERSIONS_HEADER: "0"})


async def serve() -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    return app


def main() -> None:
    from vime.engine.process import free_port

    port = free_port("127.0.0.1")
    web.run_app(
        serve(), host="127.0.0.1", port=port, print=lambda text: print(port, flush=True), access_log=None
    )


if __name__ == "__main__":
    main()
