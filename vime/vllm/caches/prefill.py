"""Has prefill engines compute the prompts of a decode engine.

    client -> router -> decode engine -> prefill engine     computes the prompt and offers its keys and values
                        decode engine <- prefill engine     a request of one token takes them into the prefix cache
    client <-           decode engine                       samples the group, whose samples find the prompt cached

So a group costs one prefill and one transfer, with every KV connector of vLLM. The pool sends the addresses of the
prefill engines (`PATH`). If none of them answers, the decode engine computes the prompt itself.

A transfer never crosses an update of the weights: a decode engine pauses after its transfers have ended, and prefill
engines pause after all decode engines (`slime.weight_sync.transfer`). An offer of other weights is not used.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

from slime.protocols import VERSIONS
from vime.pool.asgi import Receive
from vime.pool.router_client import Transient
from vime.vllm.client import VllmEngineClient
from vime.vllm.group_wire import SampleAnswer, packed

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
PATH = "/vime/prefill_engines"
"""Route of a decode engine that takes the JSON list of the prefill engines' addresses."""
DRAIN_S = 10.0
"""Seconds that an update waits for transfers."""
OFFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""vLLM's `kv_transfer_params` of a request whose keys and values another engine will take."""


class Prefills:
    """The prefill engines of a decode engine, and its transfers that are under way."""

    def __init__(self, run_key: str) -> None:
        self._run_key = run_key
        self._clients: dict[tuple[str, str], VllmEngineClient] = {}
        self._urls: list[str] = []
        self._turns = itertools.count()
        self._gate = asyncio.Event()
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._transfers = 0
        self._running: set[asyncio.Future[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()
        self.aborts = 0
        """Number of aborts of all requests so far. A request that sees another number after its transfer ends."""

    def use(self, urls: Sequence[str]) -> None:
        """Replaces the list of prefill engines."""
        self._urls = list(urls)
        for key in [key for key in self._clients if key[0] not in urls]:
            closing = asyncio.ensure_future(self._clients.pop(key).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    @property
    def used(self) -> bool:
        """Returns True if the run has prefill engines."""
        return bool(self._urls)

    async def drain(self) -> None:
        """Holds new transfers back until `resume`, and returns when the transfers under way have ended.

        It cuts transfers that take longer than `DRAIN_S`, such as one that waits behind long answers in a full engine.
        Their prompts are computed here.
        """
        self._gate.clear()
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d transfers of prompts are cut short for an update", len(self._running))
            for task in self._running:
                task.cancel()
            await self._idle.wait()

    def resume(self) -> None:
        self._gate.set()

    def abort(self) -> None:
        """Ends the requests whose prompts are not in the cache yet."""
        self.aborts += 1

    async def fill(
        self,
        engine: AsyncLLM,
        token_ids: list[int],
        name: str,
        adapter: str,
        lora: LoRARequest | None,
        live: Callable[[], int],
    ) -> bool:
        """Fills the engine's prefix cache with the prompt. `live` returns the version of the engine's weights.

        Returns False if all requests were aborted meanwhile.
        """
        aborts = self.aborts
        async with self._transfer():
            if self.aborts == aborts:
                await self._run(self._take(engine, token_ids, name, adapter, lora, live))
        return self.aborts == aborts

    async def _run(self, transfer: Coroutine[None, None, None]) -> None:
        """Runs a transfer, which `drain` may cut short."""
        task = asyncio.ensure_future(transfer)
        self._running.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._running.discard(task)
            task.cancel()  # no effect on a transfer that has ended
        if not task.cancelled():
            task.result()

    async def _take(
        self,
        engine: AsyncLLM,
        token_ids: list[int],
        name: str,
        adapter: str,
        lora: LoRARequest | None,
        live: Callable[[], int],
    ) -> None:
        """Requests the prompt's computation from a prefill engine, and stores its keys and values in the engine's
        prefix cache."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        offer = await self._offer(token_ids, adapter, live)
        if offer is None:
            return
        params = SamplingParams(max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": offer})
        prompt = tokens_input(token_ids)
        async for _ in engine.generate(prompt, params, f"{name}-prefill", lora_request=lora):
            pass

    async def _offer(
        self, token_ids: list[int], adapter: str, live: Callable[[], int]
    ) -> dict[str, object] | None:
        """Returns the parameters with which the engine fetches the prompt, or None if no prefill engine offers it."""
        first = next(self._turns)
        urls = list(self._urls)
        for turn in range(len(urls)):
            url = urls[(first + turn) % len(urls)]
            client = self._clients.setdefault((url, adapter), VllmEngineClient(url, self._run_key, adapter))
            try:
                offer, version = await client.prefill(token_ids, OFFER)
            except (Transient, ValueError, OSError, aiohttp.ClientError) as error:
                logger.warning("prefill engine %s did not compute a prompt: %s", url, error)
                continue
            if version == live():
                return offer
            logger.warning(
                "prefill engine %s has the weights %d, and this engine has %d", url, version, live()
            )
        return None

    @asynccontextmanager
    async def _transfer(self) -> AsyncIterator[None]:
        while not self._gate.is_set():  # it may close again before this task runs
            await self._gate.wait()
        self._transfers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._transfers -= 1
            if not self._transfers:
                self._idle.set()


def make_aborted(index: int, prompt: Sequence[int], version: int) -> SampleAnswer:
    """Returns the answer of a sample that was aborted before its first token."""
    columns = {VERSIONS: packed((np.empty(0, np.int32),))}
    return SampleAnswer(
        index, finish_reason="abort", weight_versions=[version], prompt_tokens=len(prompt), columns=columns
    )


async def take_urls(prefills: Prefills, receive: Receive) -> None:
    """Reads the list of addresses from a request to `PATH`."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    prefills.use(json.loads(body))
