"""Tests the limit of requests in flight: by hand, and as a semaphore whose limit changes while samples run."""

from __future__ import annotations

import asyncio

import pytest

from slime.protocols import GenerateResult
from slime.rollout.stream.concurrency import Concurrency, Window, next_limit


@pytest.mark.parametrize(
    ("limit", "seen", "expected"),
    [
        (
            512,
            Window(512, seconds=100, queued_s=1, full=True),
            544,
        ),  # 1% of the time in queues: plus 512 / 16
        (512, Window(512, seconds=100, queued_s=1, full=False), 512),  # no request waited for the limit
        (512, Window(512, seconds=100, queued_s=5, full=True), 512),  # between the two
        (512, Window(512, seconds=100, queued_s=11, full=True), 460),  # 512 * 0.9
        (512, Window(512, seconds=100, queued_s=0, preempted=1, full=True), 512),
        (512, Window(512, seconds=100, queued_s=0, preempted=60, full=True), 460),
        (33, Window(33, seconds=10, queued_s=9, full=True), 32),  # not below 512 / 16
        (512, Window(), 512),
    ],
)
def test_next_limit(limit, seen, expected):
    assert next_limit(limit, 512, seen) == expected


def test_limits_of_one_request_stay_above_zero():
    assert next_limit(1, 1, Window(1, seconds=1, queued_s=1)) == 1
    assert next_limit(1, 1, Window(1, seconds=1, full=True)) == 2


def result(queue_s, preemptions=0):
    return GenerateResult([1], [0.0], "a", "stop", [0], queue_s=queue_s, preemptions=preemptions)


def test_a_constant_stays_constant():
    limit = Concurrency(4)
    for _ in range(50):
        limit.note(1.0, result(0.9))
    assert limit.limit == 4 and limit.seen == Window()


def test_without_queue_times_nothing_changes():
    limit = Concurrency(4, adapts=True)
    for _ in range(50):
        limit.note(1.0, result(None))
    assert limit.limit == 4


async def work(limit, queue_of, number):
    """Returns the most samples that ran at once, and the limit after each window. `queue_of` gives a request's queue
    time for a number of running requests."""
    running, most, limits = 0, 0, []

    async def one():
        nonlocal running, most
        async with limit:
            running += 1
            most = max(most, running)
            waited = queue_of(running)
            await asyncio.sleep(0.001)
            limit.note(1.0, result(waited))
            limits.append(limit.limit)
            running -= 1

    await asyncio.gather(*(one() for _ in range(number)))
    return most, limits


def test_the_limit_finds_what_an_engine_takes():
    """The engine has room for 24 requests, and further requests wait."""
    limit = Concurrency(16, adapts=True)
    most, limits = asyncio.run(work(limit, lambda running: 0.0 if running <= 24 else 0.5, 1500))
    assert 24 < most <= 27
    assert min(limits[500:]) >= 20 and max(limits[500:]) <= 27


def test_a_lower_limit_acts_as_running_samples_end():
    async def run():
        limit = Concurrency(8, adapts=True)
        for _ in range(8):
            await limit.acquire()
        limit.resize(3)
        for _ in range(5):
            limit.release()
            assert limit.locked()
        limit.release()
        assert not limit.locked()
        limit.resize(8)
        for _ in range(6):
            await limit.acquire()
        assert limit.locked()

    asyncio.run(run())


def test_the_limit_follows_the_number_of_engines():
    async def run():
        limit = Concurrency(4)
        for _ in range(4):
            await limit.acquire()
        limit.scale(2)  # one of two engines has left; none of the four requests is aborted
        limit.release()
        limit.release()
        assert limit.limit == 2 and limit.locked()
        limit.scale(6)
        assert limit.limit == limit.first == 6 and not limit.locked()
        limit.release()
        limit.release()
        for _ in range(6):
            await limit.acquire()
        assert limit.locked()
        adapted = Concurrency(512, adapts=True)
        adapted.resize(100)
        adapted.scale(1024)
        assert (adapted.limit, adapted.first) == (200, 1024)

    asyncio.run(run())
