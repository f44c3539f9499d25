"""Tests functions of plug-ins that the rollout ends by cancelling them (`abort_mode`)."""

from __future__ import annotations

import asyncio

import pytest
from rollout_double import ListSource, make_args, make_state

from slime.rollout.sglang_rollout import generate, generate_and_rm, generate_rollout
from slime.types import Sample

ended = []


async def elsewhere(args, sample, sampling_params):
    """Waits for a server that the engines' abort does not reach, unless its prompt is short."""
    if sample.prompt == "slow":
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(sample.index)
    return await generate(args, sample, sampling_params)


elsewhere.abort_mode = "request"


async def wrong(args, sample, sampling_params):
    return sample


wrong.abort_mode = "kill"


def rollout(*prompts, **flags):
    args = make_args(
        custom_generate_function_path="test_request_abort.elsewhere",
        custom_rm_path="test_request_abort.reward",
        over_sampling_batch_size=3,
        rollout_deadline_s=30.0,
        **flags,
    )
    make_state(args)
    source = ListSource(args, list(prompts))
    return generate_rollout(args, 0, source), source


async def reward(args, sample):
    return 1.0


def test_a_call_that_is_not_needed_any_more_is_cancelled():
    ended.clear()
    output, source = rollout("a", "slow", "b", partial_rollout=True)
    assert [group[0].prompt for group in output.samples] == ["a", "b"]
    assert sorted(ended) == [2, 3]
    (again,) = source.buffer
    assert [sample.prompt for sample in again] == ["slow", "slow"]
    assert {sample.status for sample in again} == {Sample.Status.ABORTED}


def test_cancelling_the_rollout_cancels_the_call():
    ended.clear()
    args = make_args(custom_generate_function_path="test_request_abort.elsewhere")
    state = make_state(args)

    async def main():
        task = asyncio.create_task(generate_and_rm(args, Sample(prompt="slow", index=9), {}))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    state.run(main())
    assert ended == [9]


def test_another_mode_is_an_error():
    args = make_args(custom_generate_function_path="test_request_abort.wrong")
    state = make_state(args)
    with pytest.raises(RuntimeError, match="abort_mode must be request or server, got 'kill'"):
        state.run(generate_and_rm(args, Sample(prompt="q"), {}))
