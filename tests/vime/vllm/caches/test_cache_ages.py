"""Tests the record of the versions that computed an engine's cached blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vime.vllm.caches import ages as module
from vime.vllm.caches.ages import Ages, CacheAges
from vime.vllm.worker.columns.token_versions import Span

BLOCK = 4
PROMPT = list(range(10))


def one(
    ages: CacheAges, prompt: list[int], cached: int, version: int, response: Sequence[int] = (50,)
) -> Ages:
    """Returns the ages of a request whose tokens all come from `version`."""
    arrival = ages.arrive(prompt, version)
    return ages.finish(arrival, cached, response, [Span(version, 0, len(response))])


def test_a_cached_block_is_as_old_as_the_weights_that_computed_it() -> None:
    ages = CacheAges(BLOCK)
    assert one(ages, PROMPT, 0, 3, response=[20, 21, 22, 23]) == (0, 0)
    longer = [*PROMPT, 20, 21, 22, 23, 24]
    assert one(ages, longer, 12, 5) == (12 * 2, 2), "the response's block is in the cache too"
    assert one(ages, longer, 4, 6) == (4 * 3, 3), "the engine evicted two blocks and computed them again"
    assert one(ages, longer, 12, 6) == (4 * 3, 3), "the first block alone is still old"


def test_the_samples_of_a_group_use_blocks_of_their_own_version() -> None:
    """The first sample to finish found blocks that another sample of the group computed."""
    ages = CacheAges(BLOCK)
    arrival = ages.arrive(PROMPT, 2)
    assert ages.finish(arrival, 8, [1], [Span(2, 0, 1)]) == (0, 0)
    assert ages.finish(arrival, 0, [2], [Span(2, 0, 1)]) == (0, 0)


def test_a_response_over_an_update_has_blocks_of_two_versions() -> None:
    ages = CacheAges(BLOCK)
    response = list(range(100, 110))
    ages.finish(ages.arrive(PROMPT, 0), 0, response, [Span(0, 0, 2), Span(1, 2, 10)])
    assert one(ages, [*PROMPT, *response, 7], 20, 1) == (12, 1), "blocks 0 to 2 are older"


def test_a_flush_during_a_request_makes_its_blocks_new() -> None:
    ages = CacheAges(BLOCK)
    arrival = ages.arrive(PROMPT, 0)
    ages.flush()
    ages.finish(arrival, 0, list(range(6)), [Span(0, 0, 2), Span(4, 2, 6)])
    assert one(ages, [*PROMPT, *range(7)], 16, 4) == (0, 0)


def test_adapters_share_no_blocks() -> None:
    ages = CacheAges(BLOCK)
    ages.finish(ages.arrive(PROMPT, 0, "a"), 0, [1], [Span(0, 0, 1)])
    ages.finish(ages.arrive(PROMPT, 9, "b"), 8, [1], [Span(9, 0, 1)])
    arrival = ages.arrive(PROMPT, 9, "b")
    assert ages.finish(arrival, 8, [1], [Span(9, 0, 1)]) == (0, 0)


def test_the_oldest_records_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 3)
    ages = CacheAges(BLOCK)
    for start in (0, 100, 200):
        one(ages, list(range(start, start + 8)), 0, 0)
    assert one(ages, list(range(200, 208)), 8, 1) == (8, 1)
    assert one(ages, list(range(0, 8)), 8, 1) == (0, 0), "unknown blocks count as new"
