"""Tests each sampled token's weight version, through vLLM's own record of requests. With an engine: e2e/engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

from vime.vllm.worker.adapter import request_for
from vime.vllm.worker.columns.token_versions import Span, TokenVersions, spans, version_spans


class Server:
    """vLLM's process of a server without an engine; the test puts the engine's messages into its queue."""

    def __init__(self) -> None:
        self.versions = TokenVersions()
        self.versions.install()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: dict[str, RequestOutputCollector] = {}
        self.llm: Any = SimpleNamespace(
            engine_core=SimpleNamespace(outputs_queue=self.queue, get_output_async=self.queue.get),
            output_processor=OutputProcessor(None, log_stats=False),
            log_stats=False,
            logger_manager=None,
            renderer=SimpleNamespace(mm_processor_cache=None),
            output_handler=None,
        )
        AsyncLLM._run_output_handler(self.llm)

    def ask(self, name: str, adapter: str | None = None) -> None:
        lora = request_for(adapter) if adapter else None
        params = SamplingParams(max_tokens=99, output_kind=RequestOutputKind.FINAL_ONLY)
        request = EngineCoreRequest(
            name, [1, 2], None, params, None, 0.0, lora, None, None, external_req_id=name
        )
        self.answers[name] = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name)
        self.llm.output_processor.add_request(request, None, None, 0, self.answers[name])

    def step(self, *names: str, tokens: int = 1, ends: bool = False) -> None:
        """Sends an engine's outputs of a step. A task of vLLM counts them later."""
        reason = FinishReason.LENGTH if ends else None
        outputs = [EngineCoreOutput(name, list(range(tokens)), finish_reason=reason) for name in names]
        self.queue.put_nowait(EngineCoreOutputs(outputs=outputs))

    async def change(self, version: int, adapter: str = "") -> None:
        await self.versions.change(self.llm, version, adapter)

    async def spans(self, name: str) -> list[Span]:
        return version_spans((await self.answers[name].get()).outputs[0])


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RequestState, "_new_completion_output", RequestState._new_completion_output)
    yield


def test_every_token_has_the_version_that_was_live_when_it_came() -> None:
    async def run() -> list[list[Span]]:
        server = Server()
        server.ask("a")
        server.ask("b")
        server.step("a", tokens=3)
        await server.change(4)  # this comes at once: the three tokens are still in the queue
        assert server.queue.empty()
        server.ask("c")
        server.step("a", "b", "c")
        await server.change(4)
        await server.change(5)
        await server.change(6)
        server.step("a", "b", tokens=2)
        server.step("c", ends=True)
        server.step("a", "b", ends=True)
        return [await server.spans(name) for name in "abc"]

    a, b, c = asyncio.run(run())
    assert a == [Span(-1, 0, 3), Span(4, 3, 4), Span(6, 4, 7)]
    assert b == [Span(4, 0, 1), Span(6, 1, 4)]
    assert c == [Span(4, 0, 1), Span(6, 1, 2)]


def test_an_update_of_one_adapter_is_none_of_the_others() -> None:
    async def run() -> list[list[Span]]:
        server = Server()
        await server.change(3, "one")
        for name, adapter in (("a", "one"), ("b", "two"), ("c", None)):
            server.ask(name, adapter)
        server.step("a", "b", "c")
        await server.change(8, "two")
        server.step("a", "b", "c")
        await server.change(4, "one")
        server.step("a", "b", "c", ends=True)
        return [await server.spans(name) for name in "abc"]

    a, b, c = asyncio.run(run())
    assert a == [Span(3, 0, 2), Span(4, 2, 3)]
    assert b == [Span(-1, 0, 1), Span(8, 1, 3)]
    assert c == [Span(-1, 0, 3)]


def test_tokens_that_vllm_has_not_counted_yet_are_the_old_weights() -> None:
    """vLLM counts 128 requests at a time, and lets other tasks run in between."""
    names = [str(i) for i in range(300)]

    async def run() -> list[list[Span]]:
        server = Server()
        for name in names:
            server.ask(name)
        server.step(*names)
        server.step(*names)
        await asyncio.sleep(0)
        assert len(server.llm.output_processor.request_states["299"].detokenizer.token_ids) < 2
        await server.change(0)
        server.step(*names, ends=True)
        return [await server.spans(name) for name in names]

    assert asyncio.run(run()) == [[Span(-1, 0, 2), Span(0, 2, 3)]] * 300


def test_an_answer_that_waits_for_its_reader_keeps_the_old_version() -> None:
    async def run() -> list[list[Span]]:
        server = Server()
        for name in "abc":
            server.ask(name)
        server.step("a", ends=True)
        server.step("b", tokens=2)
        await server.change(0)
        server.step("b", tokens=2)
        await server.change(1)
        server.llm.output_processor.abort_requests(["b", "c"], internal=False)
        await server.change(2)
        return [await server.spans(name) for name in "abc"]

    assert asyncio.run(run()) == [
        [Span(-1, 0, 1)],
        [Span(-1, 0, 2), Span(0, 2, 4)],
        [Span(1, 0, 0)],
    ]


def test_a_handler_that_has_ended_is_not_waited_for() -> None:
    async def run() -> list[int]:
        server = Server()
        server.llm.output_handler.cancel()
        await asyncio.wait([server.llm.output_handler])
        await asyncio.wait_for(server.change(3), 5)
        server.llm.output_handler = None  # no request has come
        await asyncio.wait_for(server.change(4), 5)
        return server.versions.live()

    assert asyncio.run(run()) == [-1, 3, 4]


@pytest.mark.parametrize(
    ("notes", "tokens", "expected"),
    [
        ((), 3, [(7, 0, 3)]),
        ((), 0, [(7, 0, 0)]),
        (((5, 0), (6, 2)), 3, [(6, 0, 2), (7, 2, 3)]),
        (((5, 2), (6, 2)), 2, [(5, 0, 2)]),
        (((5, 4),), 3, [(5, 0, 3)]),  # a stop string removed tokens
    ],
)
def test_spans_have_no_gaps_and_none_is_empty(notes: Any, tokens: int, expected: Any) -> None:
    assert [tuple(span) for span in spans(notes, 7, tokens)] == expected
