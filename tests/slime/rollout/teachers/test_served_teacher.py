"""Tests a served teacher, with a local HTTP server that uses SGLang's and vLLM's protocol."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from rollout_double import make_tokenizer

from slime.protocols import ScoreResult
from slime.rollout import on_policy_distillation as opd
from slime.rollout.context import find_context
from slime.rollout.metrics import teacher_metrics
from slime.rollout.rewards import async_rm
from slime.rollout.state import GenerateState
from slime.rules.resolve import resolve
from slime.types import Sample

Answer = dict[str, Any] | list[Any]


async def teach(
    args: Namespace, samples: list[Sample], frozen: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Sets the teacher's log-probs as a rollout with these flags and frozen models does."""
    context = find_context(args)
    if frozen:
        tokenizer = make_tokenizer()
        context = replace(context, state=GenerateState(context.config, None, tokenizer, frozen))
    await opd.teach(context, samples)


def log_prob(token: int) -> float:
    return -token / 8


def as_sglang(body: dict[str, Any]) -> Answer:
    ids, start = body["input_ids"], body["logprob_start_len"]
    assert body["return_logprob"] and body["sampling_params"]["max_new_tokens"] == 0
    rows = [[log_prob(token) if start + i else None, token, None] for i, token in enumerate(ids[start:])]
    meta = {"input_token_logprobs": rows}
    if top := body.get("top_logprobs_num"):
        meta["input_top_logprobs"] = [None, *[[[log_prob(t), t, None] for t in range(top)] for _ in rows[1:]]]
    return {"text": "", "output_ids": [], "meta_info": meta}


def as_vllm(body: dict[str, Any]) -> Answer:
    top = body["prompt_logprobs"]
    assert body["model"] == "large"
    best = {str(t): {"logprob": log_prob(t), "rank": t + 1} for t in reversed(range(top))}
    entries: list[Any] = [{str(t): {"logprob": log_prob(t), "rank": t + 1}} | best for t in body["prompt"]]
    return {"choices": [{"text": "x", "prompt_logprobs": [None, *entries[1:]]}]}


ROUTES = {"/generate": as_sglang, "/v1/completions": as_vllm, "/teacher/generate": as_sglang}


keys: list[str | None] = []
"""Authorization headers of the requests."""


def with_server(ask: Callable[[str], Awaitable[Any]], change: Callable[[Any], Any] = lambda x: x) -> Any:
    """Returns the result of `ask` for the server's address. `change` damages an answer."""

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
    whole = sample(tokens=[4, 1, 5])  # without a prompt, nothing predicts the first token
    others = [sample(status=Sample.Status.ABORTED), sample(teacher_log_probs=[0.0] * 3)]
    empty = sample(tokens=[3, 1], response_length=0)
    done = [sample(), sample(tokens=[7, 4, 1, 5]), empty]
    with_server(lambda url: teach(args(url + path, kind), [*done, *others]))
    assert [s.teacher_log_probs for s in done] == [WANTED, WANTED, []]
    assert [s.teacher_log_probs for s in others] == [None, [0.0] * 3]
    with pytest.raises(ValueError, match="the teacher's log-probs must be finite, got .nan"):
        with_server(lambda url: teach(args(url + path, kind), [whole]))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_the_most_probable_tokens_come_with_them(kind: str) -> None:
    one = sample()
    with_server(lambda url: teach(args(url, kind, opd_top_k=2), [one]))
    ids, values = one.teacher_top
    assert (ids.dtype, ids.tolist(), values.dtype) == (np.int32, [[0, 1]] * 3, np.float32)
    assert values.tolist() == [[log_prob(0), log_prob(1)]] * 3 and one.teacher_log_probs == WANTED
    again = Sample.from_dict(one.to_dict())
    for before, after in zip(one.teacher_top, again.teacher_top, strict=True):
        np.testing.assert_array_equal(before, after)

    def fewer(answer: Any) -> Any:
        if kind == "sglang":
            answer["meta_info"]["input_top_logprobs"][-1].pop()
        else:
            del answer["choices"][0]["prompt_logprobs"][-1]["0"]
            del answer["choices"][0]["prompt_logprobs"][-1]["1"]
        return answer

    with pytest.raises(
        ValueError, match=r"its 2 most probable tokens \(--opd-top-k\) at each position, got 1"
    ):
        with_server(lambda url: teach(args(url, kind, opd_top_k=2), [sample()]), fewer)


class Engine:
    """An engine of the run whose tokens all have the log-prob `value`."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.asked: list[tuple[list[int], int, int]] = []

    async def score(
        self, token_ids: list[int], *, start: int, top_k: int = 0, deadline_s: float
    ) -> ScoreResult:
        self.asked.append((token_ids, start, top_k))
        return ScoreResult(np.full(len(token_ids) - start, self.value, np.float32))


def test_each_source_has_its_teacher() -> None:
    engines = {"teacher-math": Engine(-1.0), "teacher-default": Engine(-2.0)}
    given = Namespace(
        use_opd=True,
        opd_type="vllm",
        opd_teacher_model=["math=A", "B"],
        opd_top_k=3,
    )
    of = [{"data_source": "math"}, {"data_source": "code"}, {}]
    samples = [sample(metadata=metadata, rollout_log_probs=[-0.5] * 3) for metadata in of]
    asyncio.run(teach(given, samples, engines))
    assert [s.teacher_log_probs for s in samples] == [[-1.0] * 3, [-2.0] * 3, [-2.0] * 3]
    assert engines["teacher-math"].asked == [([3, 1, 4, 1, 5], 2, 3)]
    given.opd_teacher_model = ["math=A"]
    with pytest.raises(ValueError, match="must name one of math under 'data_source' .*got 'code'"):
        asyncio.run(teach(given, [sample(metadata=of[1])], engines))
    given.opd_teacher_key = "topic"
    asyncio.run(teach(given, [sample(metadata={"topic": "math"})], engines))


def test_metrics_of_each_teacher() -> None:
    def one(source: str, theirs: list[float], **more: Any) -> Sample:
        fields = {"metadata": {"data_source": source}, "rollout_log_probs": [-0.5, -0.5, -0.5]}
        return sample(teacher_log_probs=theirs, **fields | more)

    samples = [
        one("math", [-1.0, -1.0, -4.0], loss_mask=[1, 1, 0]),
        one("code", [-0.5, -1.0, 0.0]),
        one("code", [-9.0] * 3, remove_sample=True),
    ]
    config = resolve({"opd_teacher_url": ["math=A", "code=B"]})
    assert teacher_metrics(config, samples) == {
        "opd_samples/math": 1.0,
        "opd_reverse_kl/math": 0.5,
        "opd_samples/code": 2.0,
        "opd_reverse_kl/code": pytest.approx(0.0),
    }
    assert teacher_metrics(resolve({}), samples) == {}


def test_urls_by_source() -> None:
    keys.clear()
    samples = [sample(metadata={"data_source": "math"}), sample()]
    urls = lambda url: [f"math={url}/teacher/generate", url.replace("//", "//:other@")]  # noqa: E731
    with_server(lambda url: teach(args("", opd_teacher_url=urls(url)), samples))
    assert all(s.teacher_log_probs == WANTED for s in samples) and set(keys) == {None, "Bearer other"}


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
    of_plug_in = sample(reward=answer)  # a plug-in's reward function returns the server's answer
    assert opd.post_process_rewards(args(""), [of_plug_in, alone]) == ([0.0, 0.0], [0.0, 0.0])
    assert of_plug_in.teacher_log_probs == WANTED


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_key_in_the_address_is_a_header(kind: str) -> None:
    keys.clear()
    one = sample()
    with_server(lambda url: teach(args(url.replace("//", "//:secret@"), kind), [one]))
    assert one.teacher_log_probs == WANTED and set(keys) == {"Bearer secret"}
    with pytest.raises(TimeoutError) as error:
        asyncio.run(teach(args("http://:secret@127.0.0.1:9", kind, rollout_deadline_s=0.2), [sample()]))
    assert "127.0.0.1:9" in str(error.value) and "secret" not in str(error.value)


def test_who_is_not_asked() -> None:
    one = sample()
    hooked = args("http://127.0.0.1:9", custom_reward_post_process_path="a.b")
    for given in (Namespace(), args("", "megatron"), hooked):
        asyncio.run(teach(given, [one]))
    assert one.teacher_log_probs is None
    with pytest.raises(ValueError, match="--opd-teacher-model must be given with --opd-type vllm, got none"):
        asyncio.run(teach(args("", "vllm"), [one]))


def test_a_server_that_scores_other_tokens_is_an_error() -> None:
    def other(answer: Any) -> Any:
        answer["meta_info"]["input_token_logprobs"][-1][1] = 99
        return answer

    def short(answer: Any) -> Any:
        del answer["meta_info"]["input_token_logprobs"][:2]
        return answer

    for change in (other, short):
        with pytest.raises(ValueError, match="the teacher must score the 3 tokens of the response, got"):
            with_server(lambda url: teach(args(url), [sample()]), change)
