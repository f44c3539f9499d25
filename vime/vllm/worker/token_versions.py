"""Which weights sampled each token of an answer.

Weights change while the engine is paused. At that moment every request has as many tokens as the weights before have
sampled for it: `TokenVersions.change` notes that number at vLLM's record of the request, and a wrapped function of vLLM
puts the notes into the answer. Newer versions of vLLM have spans of their own, the oldest that we run has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from vime.pool.control import CHECKPOINT_VERSION
from vime.vllm import patches

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import RequestState

_NOTES = "vime_versions"
"""Attribute of a RequestState: (version, number of tokens when it ended) of each change. Of a CompletionOutput: its
spans."""


class Span(NamedTuple):
    """The tokens [start, end) of an answer were sampled by the weights `version`."""

    version: int
    start: int
    end: int


def spans_of(completion: CompletionOutput) -> list[Span]:
    """The spans of an answer, in order, without gaps and without empty ones. One empty span where it has no tokens."""
    found: list[Span] = getattr(completion, _NOTES)
    return found


def attach(completion: CompletionOutput, found: list[Span]) -> None:
    """Put spans into an answer."""
    setattr(completion, _NOTES, found)


def spans(notes: Sequence[tuple[int, int]], version: int, tokens: int) -> list[Span]:
    """The spans of `tokens` tokens, of which the weights `version` sampled the last ones."""
    found, start = list[Span](), 0
    for of, end in (*notes, (version, tokens)):
        end = min(end, tokens)
        if end > start:
            found.append(Span(of, start, end))
            start = end
    return found or [Span(version, 0, 0)]


class TokenVersions:
    """The versions of a server's weights: those of each adapter by its name, and of the rest by "". One in a process:
    `with_spans` reads the newest."""

    newest: ClassVar[TokenVersions | None] = None

    def __init__(self) -> None:
        self._live = {"": [CHECKPOINT_VERSION]}
        self._updated = ""

    def live(self, adapter: str | None = None) -> list[int]:
        """Oldest first, the one that samples last. None: of what the last update brought."""
        return self._live.setdefault(self._updated if adapter is None else adapter, [CHECKPOINT_VERSION])

    def since(self) -> Callable[[str | None], list[int]]:
        """A function that gives the versions of an adapter (see `live`) that are live from now to its call."""
        began = {adapter: len(versions) - 1 for adapter, versions in self._live.items()}

        def passed(adapter: str | None) -> list[int]:
            name = self._updated if adapter is None else adapter
            return self.live(name)[began.get(name, 0) :]

        return passed

    def install(self) -> None:
        """Lets vLLM's answers carry spans of these versions, in place of those of an earlier object."""
        if TokenVersions.newest is not self:
            TokenVersions.newest = self
            patches.apply("server, at its first request")

    async def change(self, engine: AsyncLLM, version: int, adapter: str = "") -> None:
        """Make `version` the live one. The engine is paused, and samples no token meanwhile."""
        live, self._updated = self.live(adapter), adapter
        if version == live[-1]:
            return
        await _processed(engine)
        for state in engine.output_processor.request_states.values():
            if state.detokenizer is not None and (state.lora_name or "") == adapter:
                notes = getattr(state, _NOTES, ())
                setattr(state, _NOTES, (*notes, (live[-1], state.detokenizer.num_output_tokens())))
        live.append(version)


def with_spans(vllms: Callable[..., CompletionOutput]) -> Callable[..., CompletionOutput]:
    """vLLM's `RequestState._new_completion_output`, whose answers carry spans of the newest `TokenVersions`."""

    def new_completion_output(
        self: RequestState,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> CompletionOutput:
        made = vllms(self, token_ids, finish_reason, stop_reason)
        assert TokenVersions.newest is not None, "install applies this patch"
        live = TokenVersions.newest.live(self.lora_name or "")[-1]
        attach(made, spans(getattr(self, _NOTES, ()), live, len(made.token_ids)))
        return made

    return new_completion_output


async def _processed(engine: AsyncLLM) -> None:
    """Return when vLLM has counted all tokens that the engine's process has sent. They came before the answer to the
    pause, but vLLM takes them from a queue in a task of its own. It takes them in order: an empty output at the end has
    been taken when those before it are counted."""
    if engine.output_handler is None:
        return
    from vllm.v1.engine import EngineCoreOutputs

    queue = cast("AsyncMPClient", engine.engine_core).outputs_queue
    queue.put_nowait(EngineCoreOutputs())
    while not queue.empty() and not engine.output_handler.done():
        await asyncio.sleep(0)
