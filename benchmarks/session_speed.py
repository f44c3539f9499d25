"""Measures the requests per second of sessions, compared with the same requests to the engine's client.

    python benchmarks/session_speed.py [--sessions 256] [--turns 4] [--tokens 16]

All use one vLLM engine on CPUs with a tiny random model. `vllm` is OpenAI's client with the engine's chat endpoint.
`sessions` is the same client with a session, which adds ids, log-probs and the router. `tokens` is the engine's client
with token ids, without an HTTP server for agents and without a chat template. Each waits for an answer before the next
turn. The order alternates, and the first round is a warm-up. The engine's prefix cache is emptied before each turn,
because all send the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import openai

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / "tests/e2e"),
    str(ROOT / "tests/slime"),
    str(ROOT / "tests/e2e/engines/conformance"),
]

from engine_fixtures import Stack  # noqa: E402
from rollout_double import make_args  # noqa: E402
from session_cases import TEMPLATE  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from slime.config import Config  # noqa: E402
from slime.rollout.state import GenerateState  # noqa: E402
from slime.sessions import open_session  # noqa: E402
from slime.types import Sample  # noqa: E402

QUESTION = "what is 12 + 34 and why is it not 13 + 34"
AGAIN = "and 5 more"


class Load:
    """The three clients' requests, over one engine."""

    def __init__(self, state: GenerateState, engine_url: str, turns: int, tokens: int) -> None:
        self.state, self.engine_url, self.turns = state, engine_url, turns
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        connections = openai.DefaultAsyncHttpxClient(limits=limits)
        self.client = openai.AsyncOpenAI(base_url=engine_url, api_key="none", http_client=connections)
        self.params = state.sampling_params | {"max_new_tokens": tokens, "ignore_eos": True}

    async def tokens(self, index: int) -> None:
        """Sends token ids with the engine's client."""
        render, encode = self.state.tokenizer.apply_chat_template, self.state.tokenizer.encode
        asked = {"tokenize": False, "add_generation_prompt": True}
        ids = encode(render([{"role": "user", "content": f"{index} {QUESTION}"}], **asked))
        more = encode("<|im_end|>" + render([{"role": "user", "content": AGAIN}], **asked))
        assert self.state.engine is not None
        for turn in range(self.turns):
            seed = index * 100 + turn
            result = await self.state.engine.generate(ids, self.params, seed=seed, deadline_s=300)
            ids = [*ids, *result.token_ids, *more]

    async def chat(self, client: openai.AsyncOpenAI, index: int, **fields: Any) -> None:
        said: list[Any] = [{"role": "user", "content": f"{index} {QUESTION}"}]
        for _ in range(self.turns):
            answer = await client.chat.completions.create(model="policy", messages=said, **fields)
            said.append(answer.choices[0].message.model_dump(exclude_none=True))
            said.append({"role": "user", "content": AGAIN})

    async def vllm(self, index: int) -> None:
        """Sends messages with OpenAI's client to vLLM's chat endpoint."""
        client = self.client.with_options(base_url=f"{self.engine_url}/v1", api_key=Stack.key)
        fields = {"max_tokens": self.params["max_new_tokens"], "extra_body": {"ignore_eos": True}}
        await self.chat(client, index, **fields)

    async def sessions(self, index: int) -> None:
        """Sends messages with OpenAI's client to a session."""
        sample = Sample(prompt="", index=index)
        async with open_session(self.state.args, sample, self.params) as session:
            client = self.client.with_options(base_url=session.base_url, api_key=session.api_key)
            await self.chat(client, index)
        (made,) = session.samples()
        assert made.metadata["session"]["turns"] == self.turns

    async def rate(self, name: str, sessions: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(getattr(self, name)(i) for i in range(sessions)))
        return sessions * self.turns / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Requests per second of sessions and of the engine's client."
    )
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        (stack.checkpoint / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        stack.pool.start()
        stack.push(stack.checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint, chat_template=TEMPLATE)
        hook_args: Any = make_args(rollout_deadline_s=300.0)
        state = GenerateState(
            Config.from_args(hook_args), stack.pool.client(), tokenizer, hook_args=hook_args
        ).enter()
        gc.collect()
        gc.freeze()  # The rollout manager's process does the same.
        load = Load(state, stack.pool.engine_urls[0], args.turns, args.tokens)
        try:
            rates: dict[str, list[float]] = {"vllm": [], "sessions": [], "tokens": []}
            for repeat in range(args.repeats + 1):
                for name in sorted(rates, reverse=bool(repeat % 2)):
                    stack.control.reset_prefix_cache()
                    rate = state.run(load.rate(name, args.sessions))
                    print(f"{name}: {rate:.1f} requests per second", flush=True)
                    if repeat:
                        rates[name].append(rate)
        finally:
            state.close()
            stack.pool.stop()
    print({name: [round(x, 1) for x in found] for name, found in rates.items()})
    vllm, sessions, tokens = (statistics.median(rates[name]) for name in ("vllm", "sessions", "tokens"))
    print(f"{args.sessions} sessions of {args.turns} turns: {sessions:.1f} requests per second")
    print(f"vLLM's chat endpoint: {vllm:.1f}, ratio {sessions / vllm:.2f}")
    print(f"the engine's client: {tokens:.1f}, ratio {sessions / tokens:.2f}")


if __name__ == "__main__":
    main()
