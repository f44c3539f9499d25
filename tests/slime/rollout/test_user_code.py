"""A user's function that raises anything, never returns, or blocks the event loop. Each hung a run, or slowed it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from rollout_double import make_args, make_state

from slime import user_code
from slime.rollout.generate import generate_and_rm_group
from slime.types import Sample

RELEASE = threading.Event()
ERRORS = {
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "CancelledError": asyncio.CancelledError(),
}


@pytest.fixture(autouse=True)
def release():
    """Threads of rewards that never return end with their test."""
    RELEASE.clear()
    yield
    RELEASE.set()


def scored(**flags):
    """One group of four samples, in the loop thread that a run uses."""
    args = make_args(**flags)
    state = make_state(args)
    group = [Sample(prompt="q: len=2 :", index=i, group_index=1) for i in range(4)]
    try:
        return state.run(generate_and_rm_group(args, group, state.sampling_params, rollout_id=0))
    finally:
        state.close()


async def raises(args, sample):
    if sample.index == 2:
        raise ERRORS[args.rm_url]
    return 1.0


def raises_in_a_thread(args, sample):
    if sample.index == 2:
        raise ERRORS[args.rm_url]
    return 1.0


async def raises_for_a_group(args, samples):
    raise ERRORS[args.rm_url]


async def raises_in_generation(args, sample, sampling_params):
    raise ERRORS[args.rm_url]


async def never(args, sample):
    await asyncio.Event().wait()


def never_in_a_thread(args, sample):
    RELEASE.wait()


async def slow(args, sample):
    await asyncio.sleep(0.5)
    return 1.0


async def blocks(args, sample):
    time.sleep(0.5)  # a blocking call where await is needed
    return 1.0


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("reward", ["raises", "raises_in_a_thread"])
def test_any_error_of_a_reward_ends_the_rollout_and_names_the_sample(reward, error):
    with pytest.raises(
        RuntimeError, match=rf"reward test_user_code.{reward} failed for sample 2 of group 1: "
    ):
        scored(custom_rm_path=f"test_user_code.{reward}", rm_url=error)


@pytest.mark.parametrize("error", ERRORS)
def test_any_error_of_a_batched_reward_or_a_generate_function(error):
    with pytest.raises(RuntimeError, match=f"the 4 samples from sample 0 of group 1: {error}"):
        scored(custom_rm_path="test_user_code.raises_for_a_group", rm_url=error, group_rm=True)
    with pytest.raises(RuntimeError, match=f"raises_in_generation failed on sample 0 of group 1: {error}"):
        scored(
            custom_rm_path="test_user_code.slow",
            rm_url=error,
            custom_generate_function_path="test_user_code.raises_in_generation",
        )


@pytest.mark.parametrize("reward", ["never", "never_in_a_thread"])
def test_a_reward_that_never_returns_ends_the_rollout(reward):
    began = time.monotonic()
    with pytest.raises(
        ValueError, match=r"sample \d of group 1: it must return within --reward-deadline-s, got no"
    ):
        scored(custom_rm_path=f"test_user_code.{reward}", reward_deadline_s=0.3)
    assert time.monotonic() - began < 5


def test_a_slow_reward_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(user_code, "SLOW_REWARD_S", 0.2)
    monkeypatch.setattr(user_code, "_last_warning_s", float("-inf"))
    scored(custom_rm_path="test_user_code.slow", reward_deadline_s=60.0)
    (line,) = [record.getMessage() for record in caplog.records if "has not returned" in record.getMessage()]
    assert "reward test_user_code.slow for sample 0 of group 1" in line
    assert "rewards that run: 4" in line and "--reward-deadline-s 60" in line


def test_a_function_that_blocks_the_event_loop_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(user_code, "BLOCKED_S", 0.2)
    scored(custom_rm_path="test_user_code.blocks")
    (line,) = [record.getMessage() for record in caplog.records if "blocks all other" in record.getMessage()]
    number = blocks.__code__.co_firstlineno + 1
    assert (
        line.startswith("--custom-rm-path test_user_code.blocks blocks") and f"{__file__}:{number};" in line
    )


def test_a_cancelled_reward_stays_cancelled():
    async def cancelled():
        args = make_args(custom_rm_path="test_user_code.never")
        state = make_state(args)
        sample = Sample(prompt="q: len=2 :", index=0, group_index=1)
        task = asyncio.create_task(generate_and_rm_group(args, [sample], state.sampling_params, rollout_id=0))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
