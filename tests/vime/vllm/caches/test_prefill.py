"""Tests a decode engine's transfers: which prefill engine computes a prompt, and what an update or an abort changes.
tests/e2e/engines/test_prefill_engines.py has real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from vime.vllm.caches.prefill import Prefills
from vime.vllm.client import Offer

pytest.importorskip("vllm")
GOOD, OLD, DEAD = "http://good", "http://old", "http://dead"


class Client:
    """Stands for the client of a prefill engine: faults of a network cannot be made to order."""

    asked: list[str] = []

    def __init__(self, url: str, run_key: str, adapter: str) -> None:
        self.url = url

    async def prefill(self, token_ids: list[int], params: object) -> Offer:
        Client.asked.append(self.url)
        await asyncio.sleep(0)
        if self.url == DEAD:
            raise OSError("no connection")
        return {"of": self.url}, 3 if self.url == OLD else 4

    async def close(self) -> None:
        Client.asked.append(f"closed {self.url}")


class Engine:
    """Records the requests that take a prompt. Each waits for `go`."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.go = asyncio.Event()
        self.go.set()

    async def generate(self, prompt: Any, params: Any, name: str, **more: Any) -> AsyncIterator[int]:
        await self.go.wait()
        self.taken.append(params.extra_args["kv_transfer_params"])
        yield 1


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> Prefills:
    monkeypatch.setattr("vime.vllm.caches.prefill.VllmEngineClient", Client)
    Client.asked = []
    return Prefills("key")


async def fill(prefills: Prefills, engine: Any) -> bool:
    return await prefills.fill(engine, [1, 2, 3], "name", "", None, lambda: 4)


def test_engines_take_turns_and_others_stand_in(prefills: Prefills) -> None:
    async def run() -> list[dict[str, Any]]:
        engine = Engine()
        prefills.use([DEAD, GOOD, OLD])
        for _ in range(3):
            assert await fill(prefills, engine)
        return engine.taken

    assert asyncio.run(run()) == [{"of": GOOD}] * 3
    assert Client.asked == [DEAD, GOOD, GOOD, OLD, DEAD, GOOD]


def test_a_prompt_of_other_weights_is_computed_again(prefills: Prefills) -> None:
    async def run() -> list[dict[str, Any]]:
        engine = Engine()
        prefills.use([OLD, DEAD])
        assert await fill(prefills, engine)
        prefills.use([])
        assert not prefills.used
        await asyncio.sleep(0)
        return engine.taken

    assert asyncio.run(run()) == []
    assert Client.asked[2:] == [f"closed {OLD}", f"closed {DEAD}"]


def test_an_update_waits_for_transfers_and_holds_new_ones_back(prefills: Prefills) -> None:
    async def run() -> None:
        engine = Engine()
        engine.go.clear()
        prefills.use([GOOD])
        first = asyncio.create_task(fill(prefills, engine))
        await asyncio.sleep(0.01)
        drained = asyncio.create_task(prefills.drain())
        second = asyncio.create_task(fill(prefills, engine))
        await asyncio.sleep(0.01)
        assert not drained.done() and Client.asked == [GOOD]
        engine.go.set()
        await asyncio.wait_for(drained, 5)
        assert first.done() and not second.done() and len(engine.taken) == 1
        prefills.resume()
        assert await second and len(engine.taken) == 2

    asyncio.run(run())


def test_an_update_cuts_transfers_that_take_too_long(
    prefills: Prefills, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is full, so the request that takes the prompt waits. The prompt is computed without a transfer."""
    monkeypatch.setattr("vime.vllm.caches.prefill.DRAIN_S", 0.02)

    async def run() -> None:
        engine = Engine()
        engine.go.clear()
        prefills.use([GOOD])
        waiting = asyncio.create_task(fill(prefills, engine))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(prefills.drain(), 5)
        assert await waiting and engine.taken == []

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_transfer(prefills: Prefills) -> None:
    async def run() -> None:
        engine = Engine()
        engine.go.clear()
        prefills.use([GOOD])
        waiting = asyncio.create_task(fill(prefills, engine))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait_for(prefills.drain(), 5)
        engine.go.set()
        await asyncio.sleep(0.01)
        assert waiting.cancelled() and engine.taken == []

    asyncio.run(run())


def test_an_abort_ends_requests_that_wait(prefills: Prefills) -> None:
    async def run() -> None:
        engine = Engine()
        prefills.use([GOOD])
        await prefills.drain()
        waiting = asyncio.create_task(fill(prefills, engine))
        await asyncio.sleep(0.01)
        prefills.abort()
        prefills.resume()
        assert not await waiting and Client.asked == [] and engine.taken == []

    asyncio.run(run())
