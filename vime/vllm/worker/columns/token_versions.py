"""Records which weights sampled each token of an answer.

Weights change while the engine is paused. At that moment, all tokens of a running request come from the weights before
the change. `TokenVersions.change` stores their number at vLLM's record of the request, and a wrapped function of vLLM
copies the numbers into the answer. Newer versions of vLLM report such spans, but the oldest version that we run does
not.
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
"""Attribute with versions. On a RequestState: (version, number of tokens when it ended) per change. On a
CompletionOutput: its spans."""


class Span(NamedTuple):
    """The tokens [start, end) of an answer, which the weights `version` sampled."""

    version: int
    start: int
    end: int


def version_spans(completion: CompletionOutput) -> list[Span]:
    """Returns the spans of an answer, in order and without gaps. An answer without tokens has one empty span; otherwise
    no span is empty."""
    found: list[Span] = getattr(completion, _NOTES)
    return found


def attach(completion: CompletionOutput, found: list[Span]) -> None:
    """Stores spans in an answer."""
    setattr(completion, _NOTES, found)


def spans(notes: Sequence[tuple[int, int]], version: int, tokens: int) -> list[Span]:
    """Returns the spans of `tokens` tokens, whose last ones were sampled by the weights `version`."""
    found, start = list[Span](), 0
    for sampled_by, end in (*notes, (version, tokens)):
        end = min(end, tokens)
        if end > start:
            found.append(Span(sampled_by, start, end))
            start = end
    return found or [Span(version, 0, 0)]


class TokenVersions:
    """The versions of a server's weights: each adapter's versions under its name, and the base weights' versions under
    "".

    A process has one live object: `with_spans` reads `newest`.
    """

    newest: ClassVar[TokenVersions | None] = None

    def __init__(self) -> None:
        self._live = {"": [CHECKPOINT_VERSION]}
        self._updated = ""

    def live(self, adapter: str | None = None) -> list[int]:
        """Returns the versions of an adapter, oldest first; the last version samples now. With None: the versions of
        the weights that the last update brought."""
        return self._live.setdefault(self._updated if adapter is None else adapter, [CHECKPOINT_VERSION])

    def since(self) -> Callable[[str | None], list[int]]:
        """Returns a function from an adapter (see `live`) to its versions that were live between this call and the
        function's call."""
        began = {adapter: len(versions) - 1 for adapter, versions in self._live.items()}

        def passed(adapter: str | None) -> list[int]:
            name = self._updated if adapter is None else adapter
            return self.live(name)[began.get(name, 0) :]

        return passed

    def install(self) -> None:
        """Makes vLLM's answers carry spans of these versions, instead of an earlier object's."""
        if TokenVersions.newest is not self:
            TokenVersions.newest = self
            patches.apply("server, at its first request")

    async def change(self, engine: AsyncLLM, version: int, adapter: str = "") -> None:
        """Makes `version` the live one. The engine must be paused, so that it samples no token meanwhile."""
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
    """Wraps vLLM's `RequestState._new_completion_output` so that its answers carry spans of the newest
    `TokenVersions`."""

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
    """Returns when vLLM has counted all tokens that the engine's process has sent.

    The tokens arrived before the answer to the pause, but a task of vLLM takes them from a queue later, in order. This
    function appends an empty output: when the queue is empty, the outputs before it have been counted.
    """
    if engine.output_handler is None:
        return
    from vllm.v1.engine import EngineCoreOutputs

    queue = cast("AsyncMPClient", engine.engine_core).outputs_queue
    queue.put_nowait(EngineCoreOutputs())
    while not queue.empty() and not engine.output_handler.done():
        await asyncio.sleep(0)
