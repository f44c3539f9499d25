"""Provides generate functions and a reward in the shapes of slime's examples. Each function fills a sample in one way
of the examples."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

RESULT = "=c"
"""The text that a tool returns."""
TURNS = 2


async def asked(
    args: Any, ids: list[int], sampling_params: dict[str, Any]
) -> tuple[dict[str, Any], list, list]:
    """Posts a request and returns the answer's `meta_info`, its tokens, and their log-probs."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    meta = (await post(url, payload))["meta_info"]
    return (
        meta,
        [one[1] for one in meta["output_token_logprobs"]],
        [one[0] for one in meta["output_token_logprobs"]],
    )


def encode(args: Any, text: str) -> list[int]:
    return list(GenerateState(args).tokenizer(text, add_special_tokens=False)["input_ids"])


async def retool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Resets the sample, keeps its empty mask while the sample grows, and restores the mask at the end."""
    sample.rollout_log_probs, sample.response, sample.response_length = None, "", 0
    sample.loss_mask = []
    mask, prompt, wrote = sample.loss_mask, encode(args, sample.prompt), []
    sample.tokens = list(prompt)
    for turn in range(TURNS):
        meta, ids, log_probs = await asked(args, prompt + wrote, sampling_params)
        wrote += ids
        sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, trainable=True, meta_info=meta)
        if turn + 1 < TURNS:
            said = encode(args, RESULT)
            wrote += said
            sample.append_response_tokens(args, tokens=said, trainable=False)
            assert len(wrote) == len(sample.rollout_log_probs)
    sample.tokens, sample.response_length, sample.loss_mask = prompt + wrote, len(wrote), mask
    sample.response = GenerateState(args).tokenizer.decode(wrote)
    sample.status = Sample.Status.COMPLETED
    return sample


async def search(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Keeps separate lists and stores them in the sample at the end."""
    prompt, wrote, mask, log_probs = encode(args, sample.prompt), [], [], []
    for turn in range(TURNS):
        meta, ids, values = await asked(args, prompt + wrote, sampling_params)
        wrote, mask, log_probs = wrote + ids, mask + [1] * len(ids), log_probs + values
        if turn + 1 < TURNS:
            said = encode(args, RESULT)
            wrote, mask, log_probs = wrote + said, mask + [0] * len(said), log_probs + [0.0] * len(said)
    sample.tokens, sample.response_length, sample.loss_mask = prompt + wrote, len(wrote), mask
    sample.response, sample.rollout_log_probs = GenerateState(args).tokenizer.decode(wrote), log_probs
    sample.update_from_meta_info(args, meta)
    return sample


async def environment(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Extends the lists of the sample itself, as the examples with an environment do."""
    sample.tokens = encode(args, sample.prompt)
    sample.loss_mask, sample.rollout_log_probs = [], []
    wrote: list[int] = []
    for turn in range(2 * TURNS - 1):
        if turn % 2:
            ids, values = encode(args, RESULT), [0.0] * len(RESULT)
        else:
            _, ids, values = await asked(args, sample.tokens, sampling_params)
        wrote.extend(ids)
        sample.tokens.extend(ids)
        sample.loss_mask.extend([1 - turn % 2] * len(ids))
        sample.rollout_log_probs.extend(values)
        sample.response_length = len(wrote)
    sample.response, sample.status = GenerateState(args).tokenizer.decode(wrote), Sample.Status.COMPLETED
    return sample


async def stream(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Restores the sample to its earlier values at each part of a stream, and then appends the whole part."""
    sample.tokens = encode(args, sample.prompt)
    base, meta = list(sample.tokens), {}
    meta, ids, values = await asked(args, base, sampling_params)
    for end in range(1, len(ids) + 1):
        sample.tokens, sample.response, sample.response_length = list(base), "", 0
        sample.loss_mask = sample.rollout_log_probs = None
        sample.append_response_tokens(
            args, tokens=ids[:end], log_probs=values[:end], meta_info=meta if end == len(ids) else None
        )
    sample.response = GenerateState(args).tokenizer.decode(ids)
    return sample


async def several(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Runs two roles, each with a copy of the sample and of `args`, and with different rewards."""
    own, made = copy.deepcopy(args), []
    own.of_roles = made

    async def role(name: str) -> None:
        one = copy.deepcopy(sample)
        one.tokens = encode(own, f"{one.prompt}{name}")
        meta, ids, values = await asked(own, one.tokens, sampling_params)
        one.append_response_tokens(own, tokens=ids, log_probs=values, meta_info=meta)
        one.response, one.reward = GenerateState(own).tokenizer.decode(ids), float(len(made) + sample.index)
        own.of_roles.append(one)

    await asyncio.gather(role("s"), role("r"))
    return made


async def judged(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sets tokens and a mask without log-probs, and computes its reward itself, as tau-bench does."""
    prompt = encode(args, sample.prompt)
    _, ids, _ = await asked(args, prompt, sampling_params)
    sample.tokens, sample.response_length = prompt + ids, len(ids)
    sample.loss_mask, sample.reward = [1] * len(ids), float(sample.index % 2)
    sample.response, sample.status = GenerateState(args).tokenizer.decode(ids), Sample.Status.COMPLETED
    return sample


async def reward(args: Any, sample: Sample, **_: Any) -> dict[str, float]:
    return {"score": float(sample.index % 2), "pred": 1.0}
