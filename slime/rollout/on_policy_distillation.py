"""On-policy distillation from served teachers, which score the token ids of finished samples (--opd-type sglang, vllm).

    with --custom-rm-path slime.rollout.on_policy_distillation.reward_func      reward_func       the reward is 0
    with a reward of the run                                                    teach             the reward stays

`post_process_rewards` is the reward post-processing that slime's scripts use together with `reward_func`. The teachers
are engines of the run (--opd-teacher-model) or servers that the user has started (--opd-teacher-url, --rm-url).
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from slime.config.schema import Config
from slime.config.sections.distillation import DistillationConfig
from slime.event_loop import loop_objects
from slime.protocols import ScoreResult, TokenScorer
from slime.roles.served import DEFAULT, by_name, teachers
from slime.rollout.context import RunContext, find_context
from slime.rollout.teachers.servers import SERVERS
from slime.types import Sample
from slime.vision.requests import request_images

_MAX_REQUESTS = 64
"""Maximum number of concurrent requests to each engine of a teacher, or to its server."""


async def teach(context: RunContext, samples: Sequence[Sample]) -> None:
    """Sets missing `teacher_log_probs` of samples, unless --custom-reward-post-process-path sets the log-probs."""
    flags = context.config.distillation
    served = flags.use_opd and flags.opd_type in SERVERS
    if served and not context.config.reward.custom_reward_post_process_path:
        unfinished = (Sample.Status.PENDING, Sample.Status.ABORTED)
        waiting = [s for s in samples if s.teacher_log_probs is None and s.status not in unfinished]
        await asyncio.gather(*(_teach(context, sample) for sample in waiting))


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: object) -> object:
    """Sets `sample.teacher_log_probs` and returns a reward of 0: the --custom-rm-path of pure distillation. For a list
    of samples (--group-rm) it returns a list."""
    samples: list[Sample] = sample if isinstance(sample, list) else [sample]
    context = find_context(args)
    await asyncio.gather(*(_teach(context, one) for one in samples if one.teacher_log_probs is None))
    rewards = [0.0] * len(samples)
    return rewards if isinstance(sample, list) else rewards[0]


def post_process_rewards(
    args: Namespace, samples: list[Sample], **kwargs: object
) -> tuple[list[float], list[float]]:
    """Returns rewards of 0, before and after normalization: the --custom-reward-post-process-path of pure distillation.

    If a plug-in's reward function returned a response of SGLang's /generate as the reward, the sample gets its
    `teacher_log_probs` from that response.
    """
    for sample in samples:
        if isinstance(sample.reward, dict) and "meta_info" in sample.reward:
            count = sample.response_length
            rows = sample.reward["meta_info"]["input_token_logprobs"][-count:]
            if [row[1] for row in rows] != list(sample.tokens[-count:]):
                raise ValueError(
                    f"the reward must hold the teacher's log-probs of the {count} tokens of the response, got "
                    f"{len(rows)} rows of other tokens; its server must use the policy's token ids"
                )
            values = np.array([np.nan if row[0] is None else row[0] for row in rows], np.float32)
            _take(sample, ScoreResult(values), "the reward")
    return [0.0] * len(samples), [0.0] * len(samples)


def find_source(flags: DistillationConfig, sample: Sample, sources: Sequence[str]) -> str:
    """Returns the sample's source, which selects its teacher: the metadata's entry --opd-teacher-key, or DEFAULT.
    Raises ValueError for a source without a teacher."""
    named = sample.metadata.get(flags.opd_teacher_key)
    if named in sources:
        return str(named)
    if DEFAULT in sources:
        return DEFAULT
    raise ValueError(
        f"a sample's metadata must name one of {', '.join(sources)} under {flags.opd_teacher_key!r} "
        f"(--opd-teacher-key), got {named!r}; add that teacher, or one without SOURCE= for all others"
    )


def find_urls(config: Config) -> dict[str, str]:
    """Maps each source to the URL of its teacher's server. Raises ValueError if no URL is set."""
    flags = config.distillation
    urls = by_name("opd_teacher_url", flags.opd_teacher_url)
    if not urls and (url := config.reward.rm_url):
        urls = {DEFAULT: url}
    if not urls:
        raise ValueError(
            f"--opd-teacher-model must be given with --opd-type {flags.opd_type or 'sglang'}, got none; or name the "
            "teacher's server in --rm-url"
        )
    return urls


async def _teach(context: RunContext, sample: Sample) -> None:
    flags, of_run = context.config.distillation, teachers(context.config)
    scorer: TokenScorer
    if of_run:
        source = find_source(flags, sample, list(of_run))
        model = of_run[source]
        scorer, shown = context.run.served(model.name), model.checkpoint
        engines = model.devices // model.devices_per_engine
    else:
        urls = find_urls(context.config)
        source = find_source(flags, sample, list(urls))
        server = SERVERS[flags.opd_type or "sglang"](urls[source])
        scorer, shown, engines = server, server.url, 1
    if not sample.response_length:
        sample.teacher_log_probs = []
        return
    images = sample.multimodal_train_inputs
    if images:
        images = await context.run.reference_images(sample)
    async with loop_objects().semaphore((teach, source), _MAX_REQUESTS * engines):
        result = await scorer.score(
            sample.tokens,
            start=len(sample.tokens) - sample.response_length,
            top_k=flags.opd_top_k,
            deadline_s=context.config.rollout.rollout_deadline_s,
            **request_images(images),
        )
    _take(sample, result, shown)


def _take(sample: Sample, result: ScoreResult, shown: str) -> None:
    """Sets the teacher's log-probs of the response. `shown` names the teacher in errors."""
    if not np.isfinite(result.log_probs).all():
        raise ValueError(
            f"the teacher's log-probs must be finite, got {result.log_probs[:4].tolist()} from {shown}; check its "
            "server and weights"
        )
    sample.teacher_log_probs = result.log_probs.tolist()
    sample.teacher_top = result.top
