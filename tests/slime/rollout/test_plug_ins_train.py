"""Plug-ins in the shapes of slime's examples train a step: what they return goes through the border to the trainer.

Each of these functions fills a sample in one of the ways that the examples do. A server answers /generate as the
gateway does; real engines do so in tests/e2e/engines.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from rollout_double import ListSource, make_args, make_state
from trainer_cases import rank_data

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.vllm_rollout import generate_rollout
from slime.utils.http_utils import post
from slime.utils.types import Sample

WRITTEN = "ab?"
RESULT = "=c"
TURNS = 2


async def asked(
    args: Any, ids: list[int], sampling_params: dict[str, Any]
) -> tuple[dict[str, Any], list, list]:
    """The answer's `meta_info`, its tokens, and their log-probs."""
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
    """Resets the sample, holds its empty mask while the sample grows, and gives the mask back at the end."""
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
    """Keeps its own lists, next to those of the sample, and sets all of them at the end."""
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
    """Sets the sample back to copies of what it had at each part of a stream, and appends all of the part."""
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
    """Two roles, each with a copy of the sample and of `args`, with rewards of their own."""
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
    """Sets tokens and a mask without log-probs, and a reward of its own, as tau-bench does."""
    prompt = encode(args, sample.prompt)
    _, ids, _ = await asked(args, prompt, sampling_params)
    sample.tokens, sample.response_length = prompt + ids, len(ids)
    sample.loss_mask, sample.reward = [1] * len(ids), float(sample.index % 2)
    sample.response, sample.status = GenerateState(args).tokenizer.decode(ids), Sample.Status.COMPLETED
    return sample


async def reward(args: Any, sample: Sample, **_: Any) -> dict[str, float]:
    return {"score": float(sample.index % 2), "pred": 1.0}


@pytest.fixture(scope="module")
def router() -> Iterator[int]:
    """The port of a server that writes WRITTEN to every prompt, with log-probs."""

    async def generate(request: web.Request) -> web.Response:
        prompt = (await request.json())["input_ids"]
        ids = [64 + ord(letter) % 30 for letter in WRITTEN]
        meta = {
            "output_token_logprobs": [[-4.5, token, None] for token in ids],
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
        }
        return web.json_response({"text": WRITTEN, "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    handle = run_app_in_thread(app)
    yield handle.port
    handle.stop()


TURN, TOOL = len(WRITTEN), len(RESULT)
DIALOGUE = [*[1] * TURN, *[0] * TOOL, *[1] * TURN]


@pytest.mark.parametrize(
    ("name", "mask", "siblings"),
    [
        ("retool", DIALOGUE, 1),
        ("search", DIALOGUE, 1),
        ("environment", DIALOGUE, 1),
        ("stream", [1] * TURN, 1),
        ("several", [1] * TURN, 2),
        ("judged", [1] * TURN, 1),
    ],
)
def test_what_a_plug_in_returns_trains_a_step(
    build, router: int, name: str, mask: list[int], siblings: int
) -> None:
    here = "test_plug_ins_train"
    args = make_args(
        custom_generate_function_path=f"{here}.{name}", custom_rm_path=f"{here}.reward", reward_key="score",
        rollout_batch_size=4,
    )  # fmt: skip
    if name in ("several", "judged"):
        args.reward_key = args.custom_rm_path = None
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", router
    make_state(args)
    groups = generate_rollout(args, 0, ListSource(args, [f"q{n}:" for n in range(4)])).samples
    samples = [sample for group in groups for sample in group]
    assert len(samples) == 8 * siblings
    for sample in samples:
        sample.check(require_log_probs=name != "judged")
        assert sample.loss_mask == mask and sample.status is Sample.Status.COMPLETED
        assert sample.response_length == len(mask)
    trainer = build(reward_key=args.reward_key)
    (step,) = trainer.train(0, rank_data(trainer.config, samples)).steps
    assert step["train/grad_norm"] > 0 and step["train/loss"] == step["train/loss"]
