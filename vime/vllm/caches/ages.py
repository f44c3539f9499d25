"""Records which weights computed the prefix cache of an engine, so that an answer can report how old its entries were.

With --flush-cache-interval above 1, a prompt may use keys and values of older weights. vLLM reports only how many
tokens it took from the cache. The process that serves HTTP sees every request of the run's client, so it records the
version for each block of tokens: the same chain of hashes as vLLM's, without vLLM's own keys.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from vime.vllm.worker.columns.token_versions import Span, version_spans

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

KEEPS_VARIABLE = "VIME_KEEPS_CACHE"
"""Name of the variable that a run with --flush-cache-interval above 1 sets in the environment of its engines."""
MOST_BLOCKS = 1 << 20
"""Largest number of blocks whose version is recorded. The oldest records are dropped first."""


class Ages(NamedTuple):
    """Ages, in weight updates, of the cached tokens that a request used: their sum and the largest one."""

    total: int
    largest: int


@dataclass(frozen=True)
class Arrival:
    """A request at its arrival: the hashes of its prompt's full blocks, and the versions that computed them."""

    adapter: str
    prompt: Sequence[int]
    hashes: list[int]
    versions: list[int]
    flushes: int
    """Number of flushes before the arrival."""


class CacheAges:
    """The versions of an engine's cached blocks. `block_tokens` is vLLM's block size."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._versions: dict[int, int] = {}
        self._flushes = 0

    @staticmethod
    def needed() -> bool:
        """Returns True in an engine that keeps its cache over updates."""
        return os.environ.get(KEEPS_VARIABLE) == "1"

    def flush(self) -> None:
        """Forgets all blocks, because the engine has dropped them."""
        self._versions.clear()
        self._flushes += 1

    def arrive(self, prompt: Sequence[int], version: int, adapter: str = "") -> Arrival:
        """Returns the record of a request that arrives while `version` is live. Blocks that are not in the cache count
        as computed by `version`, also for requests that arrive before this one is computed."""
        hashes = self._chain(prompt, hash(adapter))
        return Arrival(
            adapter,
            prompt,
            hashes,
            [self._versions.setdefault(key, version) for key in hashes],
            self._flushes,
        )

    def finish(
        self, arrival: Arrival, cached_tokens: int, response: Sequence[int], spans: Sequence[Span]
    ) -> Ages:
        """Records the blocks of a finished sample, and returns the ages of the cached tokens of its prompt.

        `spans` are the versions of the response's tokens. A token's keys and values are computed by the weights that
        sample the next token. A flush during the request makes the engine compute all blocks again.
        """
        size, first = self._block_tokens, spans[0].version
        hits = arrival.versions[: cached_tokens // size]
        ages = [max(first - version, 0) for version in hits]
        tokens = [*arrival.prompt, *response]
        hashes = arrival.hashes + self._chain(tokens, self._last(arrival), start=len(arrival.hashes) * size)
        kept = hits if arrival.flushes == self._flushes else []
        for index, key in enumerate(hashes):
            if index < len(kept):
                continue
            self._versions.pop(key, None)  # the newest record is the last of the dict
            self._versions[key] = self._computed_by((index + 1) * size - len(arrival.prompt), spans, arrival)
        while len(self._versions) > MOST_BLOCKS:
            del self._versions[next(iter(self._versions))]
        return Ages(size * sum(ages), max(ages, default=0))

    def _computed_by(self, end: int, spans: Sequence[Span], arrival: Arrival) -> int:
        """Returns the version that computed a block whose last token is the response's token `end` - 1."""
        if arrival.flushes != self._flushes:
            return spans[-1].version
        return next((span.version for span in spans if end <= span.end), spans[-1].version)

    def _last(self, arrival: Arrival) -> int:
        return arrival.hashes[-1] if arrival.hashes else hash(arrival.adapter)

    def _chain(self, tokens: Sequence[int], before: int, start: int = 0) -> list[int]:
        found = []
        for first, end in pairwise(range(start, len(tokens) + 1, self._block_tokens)):
            before = hash((before, tuple(tokens[first:end])))
            found.append(before)
        return found


class RequestAges:
    """The record of a request's prompt in the ages of its engine's cache."""

    def __init__(self, ages: CacheAges, prompt: Sequence[int], version: int, adapter: str) -> None:
        self._ages, self._arrival = ages, ages.arrive(prompt, version, adapter)

    def finish(self, output: RequestOutput) -> Ages:
        """Returns the ages of the cached tokens of a finished sample."""
        completion = output.outputs[0]
        spans = version_spans(completion)
        return self._ages.finish(self._arrival, output.num_cached_tokens or 0, completion.token_ids, spans)
