"""Functions of users, right and wrong, that the checks of `vime.testing` get."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import openai
import torch

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.rollout.vllm_rollout import generate as engine_generate
from slime.sessions import open_session
from slime.types import Sample

_calls = itertools.count()


def right(args: Any, sample: Sample) -> float:
    return float(str(sample.label) in sample.response)


async def grouped(args: Any, samples: list[Sample]) -> list[float]:
    return [float(str(sample.label) in sample.response) for sample in samples]


def not_finite(args: Any, sample: Sample) -> float:
    return float("nan") if "nan" in sample.response else 1.0


def counting(args: Any, sample: Sample) -> float:
    return float(next(_calls))


def changing(args: Any, sample: Sample) -> float:
    sample.response = sample.response.strip() + "!"
    return 0.0


def slow(args: Any, sample: Sample) -> float:
    time.sleep(0.3)
    return 0.0


def fragile(args: Any, sample: Sample) -> float:
    return float(sample.response.split()[-1])


def wordy(args: Any, sample: Sample) -> str:
    return "good"


async def too_few(args: Any, samples: list[Sample]) -> list[float]:
    return [1.0 for _ in samples[1:]]


def keep_mixed(args: Any, samples: list[Sample]) -> bool:
    return len({sample.reward for sample in samples}) > 1


def keep_in_turn(args: Any, samples: list[Sample]) -> bool:
    return next(_calls) % 2 == 0


def keep_text(args: Any, samples: list[Sample]) -> str:
    return "yes"


def keep_and_mark(args: Any, samples: list[Sample]) -> bool:
    samples[0].reward = 0.5
    return True


def keep_first(args: Any, samples: list[Sample]) -> bool:
    return samples[2].reward == 1.0


async def plain(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await engine_generate(args, sample, sampling_params)


async def tokenised_again(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Replaces a token of the response after sampling."""
    sample = await engine_generate(args, sample, sampling_params)
    sample.tokens[-1] = (sample.tokens[-1] + 1) % 256
    return sample


async def unmasked_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Adds a tool's tokens, on which the run would train."""
    sample = await engine_generate(args, sample, sampling_params)
    await asyncio.sleep(0)
    sample.tokens += [65, 66]
    sample.response_length += 2
    sample.loss_mask = [1] * sample.response_length
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), 0.0, 0.0]
    return sample


async def short_mask(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await engine_generate(args, sample, sampling_params)
    sample.loss_mask = [1] * (sample.response_length - 1)
    return sample


async def other_version(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Gives each token the version after the engine's."""
    sample = await engine_generate(args, sample, sampling_params)
    sample.weight_versions = [str(int(version) + 1) for version in sample.weight_versions]
    return sample


async def made_up_log_probs(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await engine_generate(args, sample, sampling_params)
    sample.rollout_log_probs = [0.0] * sample.response_length
    return sample


def _log_probs(args: Any, batch: Any, logits: torch.Tensor) -> torch.Tensor:
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    _, found = get_log_probs_and_entropy(logits, args=args, **{name: batch[name] for name in names})
    return torch.cat(found["log_probs"])


def reinforce(
    args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict]:
    loss = -sum_of_sample_mean(torch.cat(batch["advantages"]) * _log_probs(args, batch, logits))
    return loss, {"loss": loss.detach()}


def mean_of_rank(
    args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict]:
    """Averages over the micro-batch, so that the loss depends on how samples are spread over ranks."""
    loss = -(torch.cat(batch["advantages"]) * _log_probs(args, batch, logits)).mean() * len(batch["tokens"])
    return loss, {"loss": loss.detach()}


def endless(
    args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict]:
    loss, metrics = reinforce(args, batch, logits, sum_of_sample_mean)
    return loss + float("inf"), metrics


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


def wrong_gradient(
    args: Any, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict]:
    loss, metrics = reinforce(args, batch, logits, sum_of_sample_mean)
    return _Half.apply(loss), metrics


async def _ask(session: Any, messages: list[dict[str, str]]) -> str:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        found = await client.chat.completions.create(model=session.model, messages=messages, max_tokens=8)
        return found.choices[0].message.content or ""


async def agent(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Asks twice in one conversation."""
    async with open_session(args, sample, sampling_params) as session:
        messages = [{"role": "user", "content": "six times seven?"}]
        messages.append({"role": "assistant", "content": await _ask(session, messages)})
        await _ask(session, [*messages, {"role": "user", "content": "sure?"}])
    return session.samples()


async def forgetful_agent(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Shortens its first message before the second request."""
    async with open_session(args, sample, sampling_params) as session:
        answer = await _ask(session, [{"role": "user", "content": "six times seven?"}])
        turn = {"role": "assistant", "content": answer}
        await _ask(session, [{"role": "user", "content": "six?"}, turn, {"role": "user", "content": "sure?"}])
    return session.samples()
