"""Tests SGLang's routes on a real engine, directly and through the gateway: tokens, log-probs, streams, aborts,
errors.

test_backend_conformance.py runs these tests on its engine, which still serves after them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from argparse import Namespace
from typing import Any

import aiohttp
import pytest
import tool_calling
from engine_fixtures import EOS_ID, Stack, hf_log_probs, status
from rollout_double import make_args
from transformers import AutoTokenizer

from slime.config import Config
from slime.event_loop import loop_objects
from slime.rollout.context import find_context
from slime.rollout.on_policy_distillation import teach
from slime.rollout.state import GenerateState
from slime.types import Sample
from slime.utils.http_utils import get, post
from vime.pool.asgi import health_prefix

KEY = Stack.key
PROMPT = [14, 5, 8, 13, 21, 30]
ROUTED = health_prefix(KEY)


def gateway(stack: Stack) -> str:
    facts = stack.pool.facts
    assert facts["sglang_router_port"] == facts["vllm_router_port"]
    return f"http://{facts['sglang_router_ip']}:{facts['sglang_router_port']}"


@pytest.fixture(params=["gateway", "engine"])
def url(stack: Stack, request: pytest.FixtureRequest) -> str:
    """Yields the gateway's URL, and the engine's URL from /list_workers."""
    return gateway(stack) if request.param == "gateway" else stack.pool.engine_urls[0] + ROUTED


def ask(url: str, body: dict[str, Any], path: str = "/generate") -> Any:
    return asyncio.run(post(url + path, body, max_retries=0))


def sampled(**sampling: Any) -> dict[str, Any]:
    base = {"temperature": 1.0, "max_new_tokens": 12, "no_stop_trim": True, "skip_special_tokens": False}
    return {"input_ids": PROMPT, "sampling_params": base | sampling, "return_logprob": True}


def test_a_generate_function_of_a_plug_in_calls_its_tool(stack: Stack) -> None:
    """The tool's tokens are not trained on. test_tool_calling.py has a whole run with this function."""
    facts, tokenizer = stack.pool.facts, AutoTokenizer.from_pretrained(stack.checkpoint)
    args = make_args(rollout_max_response_len=24, hf_checkpoint=str(stack.checkpoint))
    args.sglang_router_ip, args.sglang_router_port = facts["sglang_router_ip"], facts["sglang_router_port"]
    state = GenerateState(Config.from_args(args), None, tokenizer, hook_args=args).enter()
    samples = [Sample(prompt=f"{n}+{n}", index=n) for n in range(16)]

    async def generate() -> list[Sample]:
        tasks = [tool_calling.generate(args, s, state.sampling_params | {"seed": s.index}) for s in samples]
        return await asyncio.gather(*tasks)

    found = asyncio.run(generate())
    assert sum("tool_results" in sample.metadata for sample in found) > 3
    for sample in found:
        length, mask = sample.response_length, sample.loss_mask
        assert len(mask) == len(sample.rollout_log_probs) == length <= 24
        assert set(sample.weight_versions) == {stack.version}
        written = [t for t, trained in zip(sample.tokens[-length:], mask, strict=True) if not trained]
        results = sample.metadata.get("tool_results", [])
        assert written == [t for r in results for t in tokenizer.encode(r, add_special_tokens=False)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_tokens_and_log_probs_are_those_of_our_own_client(stack: Stack, url: str, temperature: float) -> None:
    for seed in (3, 4):
        ours = stack.generate(
            PROMPT, seed=seed, temperature=temperature, max_new_tokens=12, skip_special_tokens=False
        )
        given = ask(url, sampled(temperature=temperature, seed=seed))
        meta = given["meta_info"]
        assert (
            given["output_ids"] == [token for _, token, _ in meta["output_token_logprobs"]] == ours.token_ids
        )
        assert [value for value, *_ in meta["output_token_logprobs"]] == ours.log_probs
        assert given["text"] == ours.text
        assert meta["finish_reason"]["type"] == ours.finish_reason
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(ours.token_ids))
        span = {"version": stack.version, "start": 0, "end": len(ours.token_ids)}
        assert (meta["weight_version"], meta["weight_versions"]) == (stack.version, [span])
        assert 0 <= meta["cached_tokens"] < len(PROMPT) and meta["e2e_latency"] > 0
        if temperature:
            expected = hf_log_probs(stack.checkpoint, PROMPT, ours.token_ids, temperature)
            assert [v for v, *_ in meta["output_token_logprobs"]] == pytest.approx(
                expected.tolist(), abs=1e-4
            )


def test_defaults_are_sglangs(stack: Stack, url: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint)
    made = ask(url, {"text": "1+2=", "sampling_params": {"ignore_eos": True}, "rid": "mine"})
    meta = made["meta_info"]
    assert (meta["id"], meta["completion_tokens"], meta["prompt_tokens"]) == ("mine", 128, 4)
    assert meta["finish_reason"] == {"type": "length", "length": 128}
    assert "output_token_logprobs" not in meta and "input_token_logprobs" not in meta
    assert made["text"] == tokenizer.decode(made["output_ids"], skip_special_tokens=True)


def test_text_ends_before_what_stopped_it_unless_asked(stack: Stack, url: str) -> None:
    greedy = ask(url, sampled(temperature=0.0, ignore_eos=True))
    third = greedy["text"][2]
    cut = greedy["text"].index(third)
    for keeps in (False, True):
        made = ask(url, sampled(temperature=0.0, ignore_eos=True, stop=[third], no_stop_trim=keeps))
        assert made["text"] == greedy["text"][: cut + keeps]
        assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
        assert made["output_ids"] == greedy["output_ids"][: cut + 1]
        by_id = ask(
            url,
            sampled(
                temperature=0.0,
                ignore_eos=True,
                no_stop_trim=keeps,
                stop_token_ids=[greedy["output_ids"][cut]],
            ),
        )
        assert by_id["text"] == made["text"]
        assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": greedy["output_ids"][cut]}


def test_end_of_text_is_what_matched(stack: Stack, url: str) -> None:
    made = ask(url, {**sampled(max_new_tokens=400, no_stop_trim=False, seed=1), "input_ids": PROMPT})
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    assert made["output_ids"][-1] == EOS_ID and "<|im_end|>" not in made["text"]


def test_prompt_and_top_log_probs_with_their_text(stack: Stack, url: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint)
    body = sampled(seed=2, max_new_tokens=4)
    more = {"logprob_start_len": 2, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    meta = ask(url, body | more)["meta_info"]
    expected = hf_log_probs(stack.checkpoint, PROMPT[:2], PROMPT[2:], 1.0)
    assert meta["input_token_logprobs"][0] == [None, PROMPT[2], tokenizer.decode([PROMPT[2]])]
    assert [row[1] for row in meta["input_token_logprobs"]] == PROMPT[2:]
    values = [value for value, *_ in meta["input_token_logprobs"][1:]]
    assert values == pytest.approx(expected[1:].tolist(), abs=1e-4)
    for row, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert row[2] == tokenizer.decode([row[1]]) and len(top) == 3
        assert [value for value, *_ in top] == sorted((value for value, *_ in top), reverse=True)
        assert row[0] <= top[0][0]


def test_no_new_token_is_a_score_of_the_prompt(stack: Stack, url: str) -> None:
    body = sampled(max_new_tokens=0) | {"logprob_start_len": 1}
    made = ask(url, body)
    assert (made["output_ids"], made["text"], made["meta_info"]["output_token_logprobs"]) == ([], "", [])
    assert len(made["meta_info"]["input_token_logprobs"]) == len(PROMPT) - 1


def test_a_teacher_behind_both_protocols_scores_a_sample(stack: Stack, url: str) -> None:
    """The teacher answers SGLang's /generate at the gateway, and vLLM's own /v1/completions at the engine."""
    expected = hf_log_probs(stack.checkpoint, PROMPT[:2], PROMPT[2:], 1.0)
    at_engine = stack.pool.engine_urls[0] + ROUTED + "/v1/completions"
    for kind, address in (("sglang", url + "/generate"), ("vllm", at_engine)):
        args = Namespace(use_opd=True, opd_type=kind, rm_url=address)
        sample = Sample(tokens=PROMPT, response_length=len(PROMPT) - 2, status=Sample.Status.COMPLETED)
        asyncio.run(teach(find_context(args), [sample]))
        assert sample.teacher_log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_batches_and_several_samples_of_a_prompt(stack: Stack, url: str) -> None:
    one = [ask(url, sampled(seed=seed))["output_ids"] for seed in (7, 8)]
    many = ask(url, sampled(seed=7, n=2))
    assert [made["output_ids"] for made in many] == one
    prompts = [PROMPT, PROMPT[:3]]
    both = ask(url, {**sampled(seed=7), "input_ids": prompts, "rid": ["a", "b"]})
    assert [made["meta_info"]["id"] for made in both] == ["a", "b"]
    assert both[0]["output_ids"] == one[0]
    assert [made["meta_info"]["prompt_tokens"] for made in both] == [6, 3]


async def events(url: str, body: dict[str, Any]) -> list[Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url + "/generate", json=body) as answer,
    ):
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        text = (await answer.read()).decode()
    parts = text.split("\n\n")
    assert parts.pop() == "" and parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_stream_has_all_so_far_in_each_event(stack: Stack, url: str) -> None:
    whole = ask(url, sampled(seed=9))
    parts = asyncio.run(events(url, {**sampled(seed=9), "stream": True}))
    assert len(parts) > 1
    for part in parts:
        size = len(part["output_ids"])
        assert part["output_ids"] == whole["output_ids"][:size] and whole["text"].startswith(part["text"])
        assert (
            part["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:size]
        )
    assert [part["meta_info"]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert parts[-1]["text"] == whole["text"]


def test_aborts_by_rid_and_of_all(stack: Stack, url: str) -> None:
    async def run(ask_for: dict[str, Any]) -> list[Any]:
        body = {
            "text": "1",
            "sampling_params": {"ignore_eos": True, "max_new_tokens": 480},
            "return_logprob": True,
        }
        tasks = [asyncio.create_task(post(url + "/generate", {**body, "rid": rid})) for rid in ("x-1", "y-1")]
        ended = tasks if "abort_all" in ask_for else tasks[:1]
        while not all(task.done() for task in ended):  # an abort may arrive before its request
            await post(url + "/abort_request", ask_for)
            await asyncio.sleep(0.02)
        return await asyncio.gather(*tasks)

    first, second = asyncio.run(run({"rid": "x"}))
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(first["output_ids"]) < 480
    assert len(first["meta_info"]["output_token_logprobs"]) == len(first["output_ids"])
    assert second["meta_info"]["finish_reason"] == {"type": "length", "length": 480}
    both = asyncio.run(run({"abort_all": True}))
    assert [made["meta_info"]["finish_reason"]["type"] for made in both] == ["abort", "abort"]


def test_a_client_that_goes_away_ends_its_request(stack: Stack, url: str) -> None:
    async def run() -> None:
        task = asyncio.create_task(
            post(
                url + "/generate",
                {"text": "1", "sampling_params": {"ignore_eos": True, "max_new_tokens": 500}},
            )
        )
        while not stack.metric("num_requests_running"):
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        began = time.monotonic()
        while stack.metric("num_requests_running"):
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.02)

    asyncio.run(run())


def test_the_other_routes(stack: Stack, url: str) -> None:
    async def run() -> None:
        for path in ("/get_model_info", "/model_info"):
            info = await get(url + path)
            assert (info["model_path"], info["is_generation"]) == (str(stack.checkpoint), True)
            assert info["weight_version"] == stack.version
        for path in ("/get_server_info", "/server_info"):
            assert (await get(url + path))["context_length"] == 512
        assert (await get(url + "/health_generate"))["success"] is True
        assert (await post(url + "/flush_cache", {}))["success"] is True
        assert (await post(url + "/generate", sampled()))["meta_info"]["cached_tokens"] == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "one of text and input_ids, got none"),
        ({"text": "a", "image_data": ["x"]}, "image_data must go to a model with a processor"),
        (
            {"text": "a", "sampling_params": {"temperature": "hot"}},
            "sampling_params.temperature must be float",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 600}},
            "max_new_tokens must fit the engine's context",
        ),
        ({"input_ids": [10**6]}, "out of vocabulary"),
        ({"text": "a", "return_routed_experts": True}, "return_routed_experts must be left out"),
        ({"text": "a", "top_p": 1}, "top_p must be left out"),
        ({"text": "a", "stream": "yes"}, "stream must be bool"),
    ],
)
def test_malformed_requests_are_refused_by_name(
    stack: Stack, url: str, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="HTTP 400") as error:
        ask(url, body)
    assert said in str(error.value)


def test_the_gateway_needs_the_key_and_vllm_router_must_not_drop_fields(stack: Stack) -> None:
    for method, path in [("POST", "/generate"), ("POST", "/abort_request"), ("POST", "/flush_cache")]:
        for key in (None, "wrong"):
            assert status(gateway(stack), method, path, key, {"text": "a"}) == 401, path
            assert status(stack.pool.engine_urls[0] + ROUTED, method, path, key, {"text": "a"}) == 401, path
    for path in ("/get_model_info", "/workers", "/health_generate", "/nowhere"):
        assert status(gateway(stack), "GET", path) == 401, path
    with pytest.raises(ValueError, match="must go to args.sglang_router_ip"):
        ask(stack.pool.router_url, {"text": "a"})


def test_vllms_own_route_passes_the_gateway(stack: Stack) -> None:
    async def run() -> Any:
        params = {"temperature": 1.0, "max_tokens": 6, "seed": 5, "logprobs": 1}
        body = {"token_ids": PROMPT, "sampling_params": params}
        return await post(gateway(stack) + "/inference/v1/generate", body, headers={"x-session-id": "s"})

    ours = stack.generate(PROMPT, seed=5, max_new_tokens=6)
    choice = asyncio.run(run())["choices"][0]
    assert choice["token_ids"] == ours.token_ids


@pytest.mark.slow
def test_requests_per_second(stack: Stack) -> None:
    """Compares the gateway with our own client on single requests, one after the other. VIME_GATEWAY_REQUESTS is
    their number."""
    count, tries = int(os.environ.get("VIME_GATEWAY_REQUESTS", "40")), 3

    async def seconds(together: int, one: Any) -> float:
        loop_objects().closes = True
        limit = asyncio.Semaphore(together)

        async def limited(seed: int) -> None:
            async with limit:
                await one(seed)

        await one(0)
        began = time.perf_counter()
        await asyncio.gather(*map(limited, range(count)))
        took = time.perf_counter() - began
        await loop_objects().close()
        return took

    async def ours(together: int) -> float:
        client = stack.pool.client()
        try:
            return await seconds(
                together,
                lambda seed: client.generate(
                    [*PROMPT, seed % 50], {"temperature": 1.0, "max_new_tokens": 8}, seed=seed, deadline_s=60
                ),
            )
        finally:
            await client.close()

    async def gateways(together: int) -> float:
        def one(seed: int) -> Any:
            body = sampled(seed=seed, max_new_tokens=8, skip_special_tokens=True)
            return post(gateway(stack) + "/generate", {**body, "input_ids": [*PROMPT, seed % 50]})

        return await seconds(together, one)

    for together in (1, 16):
        rates = [
            (count / asyncio.run(ours(together)), count / asyncio.run(gateways(together)))
            for _ in range(tries)
        ]
        own, through = max(rate for rate, _ in rates), max(rate for _, rate in rates)
        print(
            f"{together} at a time: client {own:.1f}/s, gateway {through:.1f}/s, share {through / own:.2f}; {rates}"
        )
        if together == 1:
            assert through > 0.5 * own  # other work on the machine makes single runs uneven
