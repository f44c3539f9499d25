"""On-policy distillation from a served teacher: it scores the token ids of finished samples (--opd-type sglang, vllm).

    with --custom-rm-path slime.rollout.on_policy_distillation.reward_func      reward_func       the reward is 0
    with a reward of the run                                                    teach             the reward stays

`post_process_rewards` is the reward post-processing that scripts of slime give beside `reward_func`.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime import http
from slime.config.schema import section_of
from slime.config.sections.distillation import DistillationConfig
from slime.config.sections.reward import RewardConfig
from slime.config.sections.rollout import RolloutConfig
from slime.types import Sample

_MAX_REQUESTS = 64
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
_models: dict[str, str] = {}

Rows = Sequence[tuple[float | None, int]]
"""(log-prob, token id) of each scored token."""


def served(args: Namespace) -> bool:
    """Whether the rollout asks a server for the teacher's log-probs."""
    flags = section_of(DistillationConfig, args)
    return flags.use_opd and flags.opd_type in _PROTOCOLS


async def teach(args: Namespace, samples: Sequence[Sample]) -> None:
    """Set `teacher_log_probs` of samples that have none, unless --custom-reward-post-process-path brings them."""
    if served(args) and not section_of(RewardConfig, args).custom_reward_post_process_path:
        unfinished = (Sample.Status.PENDING, Sample.Status.ABORTED)
        waiting = [s for s in samples if s.teacher_log_probs is None and s.status not in unfinished]
        await asyncio.gather(*(_teach(args, sample) for sample in waiting))


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: object) -> object:
    """--custom-rm-path of pure distillation: sets `sample.teacher_log_probs` and returns a reward of 0. A list of
    samples (--group-rm) gives a list."""
    samples: list[Sample] = sample if isinstance(sample, list) else [sample]
    await asyncio.gather(*(_teach(args, one) for one in samples if one.teacher_log_probs is None))
    rewards = [0.0] * len(samples)
    return rewards if isinstance(sample, list) else rewards[0]


def post_process_rewards(
    args: Namespace, samples: list[Sample], **kwargs: object
) -> tuple[list[float], list[float]]:
    """--custom-reward-post-process-path of pure distillation: rewards of 0, before and after normalization.

    A sample whose reward is an answer of SGLang's /generate, of a reward function of a plug-in, gets its
    `teacher_log_probs` from that.
    """
    for sample in samples:
        if isinstance(sample.reward, dict) and "meta_info" in sample.reward:
            rows = [(row[0], row[1]) for row in sample.reward["meta_info"]["input_token_logprobs"]]
            sample.teacher_log_probs = _of_response(rows, sample, "the reward")
    return [0.0] * len(samples), [0.0] * len(samples)


async def _teach(args: Namespace, sample: Sample) -> None:
    url = section_of(RewardConfig, args).rm_url
    kind = section_of(DistillationConfig, args).opd_type or "sglang"
    if not url:
        raise ValueError(
            f"--rm-url must be given with --opd-type {kind}, got none; name the teacher's server"
        )
    if not sample.response_length:
        sample.teacher_log_probs = []
        return
    slot = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MAX_REQUESTS))
    first = max(len(sample.tokens) - sample.response_length - 1, 0)
    async with slot:
        deadline_s = section_of(RolloutConfig, args).rollout_deadline_s
        address, key = _without_key(url)
        rows = await _PROTOCOLS[kind](_Server(address, key, deadline_s), sample.tokens, first)
    sample.teacher_log_probs = _of_response(rows, sample, address)


def _of_response(rows: Rows, sample: Sample, source: str) -> list[float]:
    """The log-probs of the response tokens, the last ones. ValueError if the server scored other tokens."""
    count = sample.response_length
    wanted, scored = list(sample.tokens[-count:]), list(rows[-count:])
    if [token for _, token in scored] != wanted:
        raise ValueError(
            f"the teacher must score the {count} tokens of the response, got {len(scored)} other ones from {source}; "
            "its server has to know the policy's token ids"
        )
    values = [math.nan if value is None else float(value) for value, _ in scored]
    if not all(map(math.isfinite, values)):
        raise ValueError(
            f"the teacher's log-probs must be finite, got {values[:4]} from {source}; check its server and weights"
        )
    return values


@dataclass(frozen=True)
class _Server:
    """Where a teacher is, the key that it wants, and how long it may take."""

    url: str
    key: str | None
    deadline_s: float

    async def post(self, url: str, body: object) -> Any:
        return await http.post(url, body, headers=self._headers, deadline_s=self.deadline_s)

    async def get(self, url: str) -> Any:
        return await http.get(url, headers=self._headers, deadline_s=self.deadline_s)

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


def _without_key(url: str) -> tuple[str, str | None]:
    """http://:KEY@HOST:PORT -> the address, which errors may print, and the key."""
    parts = urlsplit(url)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return bare.geturl(), parts.password or parts.username or None


async def _ask_sglang(server: _Server, token_ids: list[int], first: int) -> Rows:
    """SGLang's /generate: the log-probs of a prompt, and no new token."""
    body = {
        "input_ids": token_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": first,
    }
    reply = await server.post(_with_path(server.url, "/generate"), body)
    return [(row[0], row[1]) for row in reply["meta_info"]["input_token_logprobs"]]


async def _ask_vllm(server: _Server, token_ids: list[int], first: int) -> Rows:
    """vLLM's /v1/completions with prompt_logprobs: those of a prompt, and one new token, the least that it makes."""
    url = _with_path(server.url, "/v1/completions")
    if url not in _models:
        listed = await server.get(url.removesuffix("/completions") + "/models")
        _models[url] = listed["data"][0]["id"]
    body = {
        "model": _models[url],
        "prompt": token_ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }
    reply = await server.post(url, body)
    scored = reply["choices"][0]["prompt_logprobs"][first:]
    found: list[tuple[float | None, int]] = []
    for token, entry in zip(token_ids[first:], scored, strict=True):
        found.append((entry[str(token)]["logprob"] if entry else None, token))
    return found


def _with_path(url: str, path: str) -> str:
    """An address without a path gets the protocol's."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + path


_PROTOCOLS: dict[str, Callable[[_Server, list[int], int], Awaitable[Rows]]] = {
    "sglang": _ask_sglang,
    "vllm": _ask_vllm,
}
