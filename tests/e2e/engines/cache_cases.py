"""Has the tests of keys and values that outlive weight updates, on a shared engine."""

from __future__ import annotations

import threading
import time

import torch
from engine_fixtures import Stack, hf_log_probs

from slime.protocols import GenerateResult

HISTORY = [4 + index % 40 for index in range(300)]
"""A prompt of two full blocks of an engine on CPUs, and of a part of a third block."""
BLOCKS = 256


def reuse(stack: Stack, tail: int) -> GenerateResult:
    return stack.generate([*HISTORY, tail], temperature=0.0, max_new_tokens=4)


def is_of_the_weights(stack: Stack, result: GenerateResult, tail: int) -> bool:
    """Returns whether the log-probs are those of a cache that the live weights, `stack.other`, computed."""
    expected = hf_log_probs(stack.other, [*HISTORY, tail], result.token_ids, 1.0)
    return torch.allclose(torch.tensor(result.log_probs), expected, atol=1e-3, rtol=0)


def test_caches_outlive_as_many_updates_as_the_flag_gives(stack: Stack) -> None:
    """With an interval of 2, every second update drops the cache. Until then the cached tokens are those of the older
    weights, with their age."""
    transfer = stack.pool._transfer
    transfer._flush_interval, transfer._updates = 2, 0
    try:
        stack.push(stack.checkpoint)
        first = reuse(stack, 5)
        assert (first.cached_tokens, first.cache_ages) == (0, (0, 0))
        stack.push(stack.other)
        aged = reuse(stack, 6)
        assert (aged.cached_tokens, aged.cache_ages) == (BLOCKS, (BLOCKS, 1))
        assert aged.weight_versions == [stack.version]
        assert not is_of_the_weights(stack, aged, 6)
        stack.push(stack.other)
        fresh = reuse(stack, 6)
        assert (fresh.cached_tokens, fresh.cache_ages) == (0, (0, 0))
        assert is_of_the_weights(stack, fresh, 6)
        transfer._flush_interval = None
        for age in (1, 2, 3):
            stack.push(stack.checkpoint)
            assert reuse(stack, 7).cache_ages == (BLOCKS * age, age)
    finally:
        transfer._flush_interval = 1
    stack.push(stack.other)
    assert reuse(stack, 6).cached_tokens == 0


def test_running_requests_keep_their_cache_over_an_update(stack: Stack) -> None:
    """The request is not computed again, and its tokens still have the versions of the weights that sampled them."""
    transfer = stack.pool._transfer
    before = stack.metric("num_preemptions_total")
    transfer._flush_interval, transfer._updates = 2, 1
    found: list[GenerateResult] = []
    thread = threading.Thread(
        target=lambda: found.append(stack.generate(HISTORY[:20], max_new_tokens=300, ignore_eos=True))
    )
    try:
        thread.start()
        while not stack.metric("num_requests_running"):
            time.sleep(0.01)
        stack.push(stack.checkpoint)
    finally:
        transfer._flush_interval = 1
        thread.join()
    assert found[0].weight_versions == [stack.version - 1, stack.version]
    assert found[0].preemptions == 0 and stack.metric("num_preemptions_total") == before
