"""Tests episodes of environments over sessions: rewards, faults, limits and time, with a scripted engine. The
environment is a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_double import make_args, make_state
from session_double import END, Scripted

from slime.data.agents import session_record
from slime.environments import hubs, process
from slime.environments.hubs import Hub
from slime.environments.process import close_processes, living
from slime.records import once
from slime.sessions.environments import generate
from slime.types import Sample

CONNECTOR = str(Path(__file__).parents[1] / "environments" / "scripted_connector")
TEXT = "scripted:one"

Run = Callable[..., list[Sample]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run(*tasks, **flags)` returns the samples of an episode per task, all at once. Each answer is "ab"."""
    monkeypatch.setitem(hubs.HUBS, "scripted", Hub(CONNECTOR, "a name"))
    monkeypatch.setattr(process, "ANSWER_S", 0.3)
    once.forget()

    def run(*tasks: str, **flags: Any) -> list[Sample]:
        args = make_args(rollout_max_response_len=400)
        vars(args).update(flags)
        engine = Scripted(lambda _: f"ab{END}")
        state = make_state(args, engine.tokenizer)
        state.engine = engine

        async def all_of() -> list[Any]:
            chosen = ({"environment": TEXT, "task": task, "label": "l"} for task in tasks)
            samples = [
                Sample(
                    prompt=[{"role": "user", "content": "go"}], index=n, metadata={"environment_task": one}
                )
                for n, one in enumerate(chosen)
            ]
            return await asyncio.gather(
                *(generate(args, sample, state.sampling_params) for sample in samples)
            )

        try:
            return [sample for made in state.run(all_of()) for sample in made]
        finally:
            state.close()

    yield run
    close_processes()


def test_an_episode_makes_a_sample_with_the_reward_of_the_environment(run: Run) -> None:
    """Two requests with the same messages are two branches."""
    one, two, again = run("1", "2")
    for sample in (one, two, again):
        sample.check()
        assert (
            sample.status is Sample.Status.COMPLETED and sample.response == f"ab{END}" and sample.label == "l"
        )
        assert not sample.remove_sample and sample.loss_mask == [1, 1, 1]
    assert (one.reward, two.reward, again.reward) == (1.0, 2.0, 2.0)
    assert one.metadata["environment_task"]["metrics"] == {"requests": 1.0}
    assert (
        two.metadata[session_record.KEY]["turns"] == 2 and two.metadata[session_record.KEY]["ended"] == "done"
    )
    assert living(hubs.find_environment(TEXT)) is None, "the end of the run ends the process"


@pytest.mark.parametrize(
    "task, reason, said",
    [
        ("raise", "environment", "failed: ZeroDivisionError: division by zero"),
        ("exit", "environment", "failed: SystemExit: 3"),
        (
            "die",
            "environment",
            "failed: its process has ended with status 3, and printed last: more text",
        ),
        ("nan", "reward", "must give a finite number as reward, got nan"),
        ("text", "reward", "must give a finite number as reward, got 'good'"),
        ("wait", "environment", "did not end an episode within --session-deadline-s 0.5"),
        ("block", "environment", "did not end an episode within --session-deadline-s 0.5"),
    ],
)
def test_an_episode_without_a_reward_is_named_once_and_not_trained_on(
    run: Run, caplog: pytest.LogCaptureFixture, task: str, reason: str, said: str
) -> None:
    caplog.set_level(logging.WARNING)
    samples = run(task, task, session_deadline_s=0.5 if task in ("wait", "block") else 60.0)
    for sample in samples:
        assert sample.status is Sample.Status.FAILED and sample.remove_sample and sample.reward == 0.0
        record = sample.metadata[session_record.KEY]
        assert (record["ended"], record["said"]) == (reason, said)
        assert sample.metadata["removed"] == {"reason": reason, "said": said}
    lines = [r.getMessage() for r in caplog.records if r.name == "slime.sessions.environments"]
    assert lines == [f"environment {TEXT}: {said}; such samples are not trained on"]


def test_other_episodes_go_on_after_a_process_has_ended(run: Run) -> None:
    """At most one episode runs at once, so that the second starts after the end of the first."""
    died, lived = run("die", "1", environment_concurrency=1)
    assert died.status is Sample.Status.FAILED and lived.reward == 1.0


def test_an_episode_beyond_a_limit_of_the_session_is_truncated_with_reward_0(run: Run) -> None:
    for sample in run("3", session_max_turns=2):
        assert sample.status is Sample.Status.TRUNCATED and sample.reward == 0.0 and not sample.remove_sample


def test_a_sample_without_a_task_is_generated_as_without_environments() -> None:
    args = make_args()
    engine = Scripted(lambda _: f"ab{END}")
    state = make_state(args, engine.tokenizer)
    state.engine = engine
    try:
        made = state.run(generate(args, Sample(prompt="go", index=0), state.sampling_params))
    finally:
        state.close()
    assert made.response == f"ab{END}" and made.reward is None and made.status is Sample.Status.COMPLETED
