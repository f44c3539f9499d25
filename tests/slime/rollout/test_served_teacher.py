"""A served teacher against a local HTTP server that speaks SGLang's and vLLM's protocol."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from slime.rollout import on_policy_distillation as opd
from slime.rollout.rewards import async_rm
from slime.types import Sample

Answer = dict[str, Any] | list[Any]


def log_prob(token: int) -> float:
    return -token / 8


def as_sglang(body: dict[str, Any]) -> Answer:
    ids, start = body["input_ids"], body["logprob_start_len"]
    assert body["return_logprob"] and body["sampling_params"]["max_new_tokens"] == 0
    rows = [[log_prob(token) if start + i else None, token, None] for i, token in enumerate(ids[start:])]
    return {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": rows}}


def as_vllm(body: dict[str, Any]) -> Answer:
    assert (body["model"], body["prompt_logprobs"]) == ("large", 0)
    entries: list[Any] = [{str(t): {"logprob": log_prob(t), "rank": 3}} for t in body["prompt"]]
    return {"choices": [{"text": "x", "prompt_logprobs": [None, *entries[1:]]}]}


ROUTES = {"/generate": as_sglang, "/v1/completions": as_vllm, "/teacher/generate": as_sglang}


keys: list[str | None] = []
"""What the requests were authorised with."""


def with_server(ask: Callable[[str], Awaitable[Any]], change: Callable[[Any], Any] = lambda x: x) -> Any:
    """What `ask` returns, given the server's address. `change` spoils an answer."""

    async def handler(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "large"}]})
        return web.json_response(change(ROUTES[request.path](await request.json())))

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await ask(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def sample(**fields: Any) -> Sample:
    given = {"tokens": [3, 1, 4, 1, 5], "response_length": 3, "status": Sample.Status.COMPLETED}
    return Sample(**given | fields)


def args(url: str, kind: str = "sglang", **more: Any) -> Namespace:
    return Namespace(use_opd=True, opd_type=kind, rm_url=url, **more)


WANTED = [log_prob(t) for t in (4, 1, 5)]


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("sglang", ""),
        ("sglang", "/"),
        ("sglang", "/teacher/generate"),
        ("vllm", ""),
        ("vllm", "/v1/completions"),
    ],
)
def test_finished_samples_get_log_probs(kind: str, path: str) -> None:
    whole = sample(tokens=[4, 1, 5])  # no prompt: nothing predicts the first token
    others = [sample(status=Sample.Status.ABORTED), sample(teacher_log_probs=[0.0] * 3)]
    empty = sample(tokens=[3, 1], response_length=0)
    done = [sample(), sample(tokens=[7, 4, 1, 5]), empty]
    with_server(lambda url: opd.teach(args(url + path, kind), [*done, *others]))
    assert [s.teacher_log_probs for s in done] == [WANTED, WANTED, []]
    assert [s.teacher_log_probs for s in others] == [None, [0.0] * 3]
    with pytest.raises(ValueError, match="the teacher's log-probs must be finite, got .nan"):
        with_server(lambda url: opd.teach(args(url + path, kind), [whole]))


def test_the_hooks_of_slimes_scripts() -> None:
    async def ask(url: str) -> list[Any]:
        given = args(url, custom_rm_path="slime.rollout.on_policy_distillation.reward_func")
        alone, group = sample(), [sample(), sample()]
        return [await async_rm(given, alone), alone, await opd.reward_func(given, group), group]

    reward, alone, rewards, group = with_server(ask)
    assert (reward, rewards) == (0.0, [0.0, 0.0])
    assert all(s.teacher_log_probs == WANTED for s in (alone, *group))
    answer = as_sglang(
        {
            "input_ids": [3, 1, 4, 1, 5],
            "logprob_start_len": 0,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 0},
        }
    )
    of_plug_in = sample(reward=answer)  # a reward function of a plug-in returns the server's answer
    assert opd.post_process_rewards(args(""), [of_plug_in, alone]) == ([0.0, 0.0], [0.0, 0.0])
    assert of_plug_in.teacher_log_probs == WANTED


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_key_in_the_address_is_a_header(kind: str) -> None:
    keys.clear()
    one = sample()
    with_server(lambda url: opd.teach(args(url.replace("//", "//:secret@"), kind), [one]))
    assert one.teacher_log_probs == WANTED and set(keys) == {"Bearer secret"}
    with pytest.raises(TimeoutError) as error:
        asyncio.run(opd.teach(args("http://:secret@127.0.0.1:9", kind, rollout_deadline_s=0.2), [sample()]))
    assert "127.0.0.1:9" in str(error.value) and "secret" not in str(error.value)


def test_who_is_not_asked() -> None:
    one = sample()
    hooked = args("http://127.0.0.1:9", custom_reward_post_process_path="a.b")
    for given in (Namespace(), args("", "megatron"), hooked):
        asyncio.run(opd.teach(given, [one]))
    assert one.teacher_log_probs is None
    with pytest.raises(ValueError, match="--opd-teacher-model must be given with --opd-type vllm, got none"):
        asyncio.run(opd.teach(args("", "vllm"), [one]))


def test_a_server_that_scores_other_tokens_is_an_error() -> None:
    def other(answer: Any) -> Any:
        answer["meta_info"]["input_token_logprobs"][-1][1] = 99
        return answer

    def short(answer: Any) -> Any:
        del answer["meta_info"]["input_token_logprobs"][:2]
        return answer

    for change in (other, short):
        with pytest.raises(ValueError, match="the teacher must score the 3 tokens of the response, got"):
            with_server(lambda url: opd.teach(args(url), [sample()]), change)
