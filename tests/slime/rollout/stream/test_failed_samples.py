"""Tests --failed-samples with rewards, generate functions and sandboxes that really do not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from rollout_double import ListSource, make_args, make_state
from test_stream import prompts_of

from slime.agent.sandbox import LocalSandbox
from slime.rollout import vllm_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.tracking.journal import read_events
from slime.types import Sample

RELEASE = threading.Event()
PROMPTS = ["bad", "b", "c", "d"]


@pytest.fixture(autouse=True)
def _threads_end():
    RELEASE.clear()
    yield
    RELEASE.set()
    time.sleep(0.05)


def hangs(args: object, sample: Sample) -> float:
    """Sleeps for the first sample of the prompt "bad" until the test ends."""
    if sample.prompt == "bad" and sample.index == 0:
        RELEASE.wait()
    return float(sample.index % 2)


async def sleeps(args: object, sample: Sample) -> float:
    if sample.prompt == "bad" and sample.index == 0:
        await asyncio.sleep(60)
    return float(sample.index % 2)


async def sleeps_once(args: object, sample: Sample) -> float:
    if sample.prompt == "bad" and sample.index == 0 and not RELEASE.is_set():
        RELEASE.set()
        await asyncio.sleep(60)
    return 1.0


async def agent_never_answers(args: object, sample: Sample, sampling_params: object) -> Sample:
    if sample.prompt == "bad" and sample.index == 0:
        await asyncio.Event().wait()
    return answer(sample)


async def sandbox_dies(args: object, sample: Sample, sampling_params: object) -> Sample:
    if sample.prompt == "bad" and sample.index == 0:
        async with LocalSandbox() as sandbox:
            sandbox._process.kill()
            await sandbox.exec("echo 1")
    return answer(sample)


async def agent_fails(args: object, sample: Sample, sampling_params: object) -> Sample:
    raise KeyError("a fault of the agent's code")


def answer(sample: Sample) -> Sample:
    sample.tokens = [1]
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-0.5, -0.25])
    sample.status = Sample.Status.COMPLETED
    return sample


REWARD = {"custom_rm_path": "test_failed_samples.sleeps", "reward_deadline_s": 0.1}
AGENT = {
    "custom_rm_path": "test_failed_samples.sleeps_once",
    "custom_generate_function_path": "test_failed_samples.agent_never_answers",
    "session_deadline_s": 0.01,
}


def roll(folder: Path, policy: str, prompts: list[str] = PROMPTS, **flags: object) -> RolloutFnTrainOutput:
    args = make_args(failed_samples=policy, run_dir=str(folder), **flags)
    make_state(args)
    return vllm_rollout.generate_rollout(args, 0, ListSource(args, prompts))


def failed(folder: Path) -> list[tuple[int, int, str, str]]:
    events = read_events(folder, ("failed",))
    return [(e.get("groups")[0], e.get("sample"), e.get("reason"), e.get("state")) for e in events]


@pytest.mark.parametrize("reward", ["sleeps", "hangs"])
def test_the_group_of_a_reward_that_hangs_is_dropped(tmp_path, reward):
    flags = {"custom_rm_path": f"test_failed_samples.{reward}", "reward_deadline_s": 0.5}
    output = roll(tmp_path, "drop", over_sampling_batch_size=2, **flags)
    assert prompts_of(output) in (["b", "c"], ["b", "d"])  # two prompts replace the dropped group
    assert output.metrics["rollout/dynamic_filter/drop_reward_deadline"] == 1
    assert output.metrics["rollout/failed_samples/dropped"] == 1
    assert failed(tmp_path)[-1] == (0, 0, "reward_deadline", "dropped")
    dropped = [e for e in read_events(tmp_path, ("dropped",)) if e.get("reason") == "reward_deadline"]
    assert [e.get("groups") for e in dropped][-1] == [0]


def test_a_sample_whose_reward_hangs_is_replaced(tmp_path):
    output = roll(tmp_path, "replace", **REWARD | {"custom_rm_path": "test_failed_samples.sleeps_once"})
    assert prompts_of(output) == ["bad", "b"]
    assert [s.reward for s in output.samples[0]] == [1.0, 1.0]
    assert output.metrics["rollout/failed_samples/replaced"] == 1
    assert failed(tmp_path) == [(0, 0, "reward_deadline", "replaced")]


def test_a_sample_that_always_fails_is_replaced_three_times_and_its_group_dropped(tmp_path):
    output = roll(tmp_path, "replace", over_sampling_batch_size=2, **REWARD)
    assert "bad" not in prompts_of(output)
    assert [end for _, _, _, end in failed(tmp_path)] == ["replaced"] * 3 + ["dropped"]


def test_a_group_is_kept_without_the_sample_whose_reward_hangs(tmp_path):
    output = roll(tmp_path, "keep", **REWARD)
    assert prompts_of(output) == ["bad", "b"]
    bad, good = output.samples[0]
    assert (
        bad.remove_sample
        and not any(bad.loss_mask)
        and bad.metadata["removed"]["reason"] == "reward_deadline"
    )
    assert (bad.reward, good.reward, good.remove_sample) == (1.0, 1.0, False)
    assert bad.response_length > 0
    assert output.metrics["rollout/failed_samples/kept"] == 1


@pytest.mark.parametrize("policy", ["drop", "keep"])
def test_an_agent_that_never_answers(tmp_path, policy):
    output = roll(tmp_path, policy, over_sampling_batch_size=2, **AGENT)
    assert ("bad" in prompts_of(output)) == (policy == "keep")
    end = {"drop": "dropped", "keep": "kept"}[policy]
    assert failed(tmp_path) == [(0, 0, "generate_deadline", end)]
    for sample in output.samples[0]:
        sample.check()
        assert sample.remove_sample == (policy == "keep" and sample.index == 0)


def test_a_sandbox_that_dies(tmp_path):
    flags = {"custom_generate_function_path": "test_failed_samples.sandbox_dies", "session_deadline_s": 60.0}
    output = roll(tmp_path, "keep", **AGENT | flags)
    assert failed(tmp_path) == [(0, 0, "sandbox", "kept")] and prompts_of(output) == ["bad", "b"]


def test_the_policy_end_ends_the_run(tmp_path):
    with pytest.raises(ValueError, match="sample 0 of group 0: it must return within --reward-deadline-s"):
        roll(tmp_path, "end", **REWARD)


def test_faults_of_the_users_code_end_the_run_under_every_policy(tmp_path):
    flags = {"custom_generate_function_path": "test_failed_samples.agent_fails"}
    with pytest.raises(RuntimeError, match="a fault of the agent's code"):
        roll(tmp_path, "keep", **AGENT | flags)


def test_a_reward_that_hangs_for_every_group_ends_the_run(tmp_path):
    with pytest.raises(ValueError, match="must return within --reward-deadline-s"):
        roll(
            tmp_path, "drop", ["bad"] * 12, **REWARD | {"custom_rm_path": "test_failed_samples.sleeps_always"}
        )


async def sleeps_always(args: object, sample: Sample) -> float:
    await asyncio.sleep(60)
    return 0.0


def test_a_group_without_any_good_sample_is_dropped(tmp_path):
    flags = REWARD | {"custom_rm_path": "test_failed_samples.sleeps_for_bad"}
    assert "bad" not in prompts_of(roll(tmp_path, "keep", over_sampling_batch_size=2, **flags))
    assert failed(tmp_path)[-1] == (0, 0, "all_samples", "dropped")


async def sleeps_for_bad(args: object, sample: Sample) -> float:
    if sample.prompt == "bad":
        await asyncio.sleep(60)
    return 1.0


def test_threads_that_hang_leave_the_others_their_threads(tmp_path):
    """More rewards hang than asyncio has threads."""
    flags = REWARD | {
        "custom_rm_path": "test_failed_samples.hangs_for_bad",
        "reward_deadline_s": 0.3,
        "rollout_batch_size": 4,
    }
    prompts = ["bad", "b"] * 4 + ["c"] * 4
    output = roll(tmp_path, "drop", prompts, n_samples_per_prompt=8, over_sampling_batch_size=4, **flags)
    assert "bad" not in prompts_of(output)


def hangs_for_bad(args: object, sample: Sample) -> float:
    if sample.prompt == "bad":
        RELEASE.wait()
    return 1.0
