"""The generate function of --environment, which runs an episode of an environment over a session.

The environment sends its requests to the session, which records the tokens. The environment's rubric computes the
reward. An episode that fails, exceeds its time or has no finite reward is not trained on. Each distinct error is logged
once, in one line.
"""

from __future__ import annotations

import asyncio
import logging
import math
from argparse import Namespace
from dataclasses import dataclass, field, replace
from typing import cast

from slime.environments.hubs import Environment, find_environment
from slime.environments.process import (
    EnvironmentFault,
    EnvironmentProcess,
    close_processes,
    get_process,
    living,
)
from slime.environments.protocol import EpisodeResult
from slime.environments.rows import KEY
from slime.event_loop import loop_objects
from slime.records.once import warn_once
from slime.rollout import generate as without_environment
from slime.rollout.context import find_context
from slime.sessions.limits import ABORTS, LIMITS, SessionLimits
from slime.sessions.opening import open_session
from slime.sessions.session import Session
from slime.types import Json, Sample, SamplingParams

logger = logging.getLogger(__name__)

ENDED = "environment"
"""The reason for the end of a session whose environment raised an error, or did not end its episode in time."""
REWARD = "reward"


@dataclass(frozen=True)
class Episode:
    """The result of an episode. `fault` is the error of an episode without a reward, otherwise ""."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    reason: str = ENDED


async def generate(args: Namespace, sample: Sample, sampling_params: SamplingParams) -> Sample | list[Sample]:
    """Runs the episode of a sample's task and returns its samples. A sample without a task is generated as without
    --environment."""
    if KEY not in sample.metadata:
        return await without_environment.generate(args, sample, sampling_params)
    flags, chosen = find_context(args).config.sessions, sample.metadata[KEY]
    environment, task = find_environment(chosen["environment"]), chosen["task"]
    limits = SessionLimits.of(flags)
    sample.label = chosen["label"]
    own = replace(limits, seconds=None)  # `_episode` limits the environment's time
    gate = loop_objects().semaphore((KEY, environment.text), flags.environment_concurrency)
    async with gate, open_session(args, sample, sampling_params, limits=own) as session:
        episode = await _episode(environment, task, session, limits.seconds)
        if episode.fault and session.ended not in (*LIMITS, *ABORTS):
            session.end(episode.reason, episode.fault)
            key = f"{environment.text}: {episode.fault}"
            warn_once(logger, key, "environment %s; such samples are not trained on", key)
    made = session.samples(episode.reward)
    made[0].metadata[KEY] = {**chosen, "metrics": episode.metrics}
    return made


async def _episode(environment: Environment, task: Json, session: Session, seconds: float | None) -> Episode:
    try:
        process = await _process(environment)
    except ValueError as error:  # The run's start loaded the environment, and its process has ended since.
        return Episode(fault=str(error))
    try:
        async with asyncio.timeout(seconds):
            result = await process.finish(
                "run_episode",
                base_url=session.base_url,
                api_key=session.api_key,
                model=session.model,
                task=task,
            )
    except TimeoutError:
        return Episode(fault=f"did not end an episode within --session-deadline-s {seconds:g}")
    except EnvironmentFault as error:
        return Episode(fault=f"failed: {error}")
    return _checked(cast(EpisodeResult, result))


def _checked(result: EpisodeResult) -> Episode:
    """Converts a connector's answer to an episode. Without a finite reward, the episode has a fault."""
    reward, metrics = result["reward"], result["metrics"]
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        numbers = {name: float(one) for name, one in metrics.items() if isinstance(one, bool | int | float)}
        return Episode(float(reward), numbers)
    return Episode(fault=f"must give a finite number as reward, got {reward!r:.80}", reason=REWARD)


async def _process(environment: Environment) -> EnvironmentProcess:
    """Returns the environment's process, and starts it if it does not run. The end of the run's loop closes all
    environment processes."""
    loop_objects().get(close_processes, lambda: None, lambda _: asyncio.to_thread(close_processes))
    if (process := living(environment)) is not None:
        return process
    async with loop_objects().get((KEY, "start", environment.text), asyncio.Lock):
        return await asyncio.to_thread(get_process, environment)
