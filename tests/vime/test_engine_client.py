"""Requests, retries and refusals of the client, against a local HTTP server that fails on purpose."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from slime.divergence import DivergedError
from slime.protocols import GenerateResult
from vime.engine import compact_log_probs
from vime.engine.client import VllmEngineClient, parse_completion, request_body
from vime.engine.process import free_port
from vime.engine.server import EngineServer, EngineSpec

ANSWER = {
    "choices": [
        {
            "text": "46",
            "token_ids": [8, 10, 2],
            "logprobs": {"token_logprobs": [-0.5, -0.25, 0.0]},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
}


def serve(handler: Callable[[web.Request], Any], ask: Callable[[VllmEngineClient], Any]) -> Any:
    """What `ask` returns when the router is `handler`."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port("127.0.0.1")
        await web.TCPSite(runner, "127.0.0.1", port).start()
        client = VllmEngineClient(f"http://127.0.0.1:{port}", "k")
        try:
            return await ask(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


def generate(deadline_s: float = 5.0) -> Callable[[VllmEngineClient], Any]:
    return lambda client: client.generate([1, 2], {"max_new_tokens": 4}, seed=3, deadline_s=deadline_s)


def test_slime_names_become_vllm_names() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "stop": None,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
    }
    assert request_body([4, 5], given, 11) == {
        "model": "policy",
        "prompt": [4, 5],
        "seed": 11,
        "logprobs": 0,
        "return_token_ids": True,
        "vllm_xargs": {"vime_compact_log_probs": 1},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "max_tokens": 7,
        "min_tokens": 2,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    assert request_body([4], {"no_stop_trim": False}, 0)["include_stop_str_in_output"] is False
    with pytest.raises(ValueError, match=r"sampling parameters must be among .*, got \['top_q'\]"):
        request_body([4], {"top_q": 1}, 0)


def test_an_answer_becomes_a_record() -> None:
    assert parse_completion(ANSWER, "3,4") == GenerateResult(
        token_ids=[8, 10, 2],
        log_probs=[-0.5, -0.25, 0.0],
        text="46",
        finish_reason="stop",
        weight_versions=[3, 4],
        prompt_tokens=5,
        cached_tokens=4,
    )


def test_a_log_prob_that_is_nan_names_the_weights() -> None:
    choice = ANSWER["choices"][0]
    spoiled = {**choice, "logprobs": {"token_logprobs": [-0.5, compact_log_probs.NOT_A_NUMBER, 0.0]}}
    rule = "log-probs of the engine must be finite, got nan at token 1 of a response with the weights after rollout 3"
    with pytest.raises(DivergedError, match=rule) as error:
        parse_completion({**ANSWER, "choices": [spoiled]}, "3,4")
    assert error.value.rollout_id == 3
    with pytest.raises(DivergedError, match="with the first weights"):
        parse_completion({**ANSWER, "choices": [spoiled]}, "0")


def test_what_the_engine_says_of_a_request_comes_in_seconds() -> None:
    """One that made a single token has no time between tokens; vLLM leaves out or nulls what it did not measure."""
    whole = parse_completion({**ANSWER, "metrics": {"queue_time_ms": 250.0, "mean_itl_ms": 20.0}}, "0")
    assert (whole.queue_s, whole.decode_tokens_per_s) == (0.25, 50.0)
    short = parse_completion({**ANSWER, "metrics": {"queue_time_ms": 0.0, "mean_itl_ms": None}}, "0")
    assert (short.queue_s, short.decode_tokens_per_s) == (0.0, None)
    for silent in ({**ANSWER, "metrics": None}, {**ANSWER, "metrics": {}}):
        assert parse_completion(silent, "0").queue_s is None


@pytest.mark.parametrize(
    "log_probs", [None, {"token_logprobs": [-0.5]}, {"token_logprobs": [-0.5, None, 0.0]}]
)
def test_a_missing_log_prob_is_an_error(log_probs: Any) -> None:
    choice = {**ANSWER["choices"][0], "logprobs": log_probs}
    with pytest.raises(ValueError, match="one log-prob per token"):
        parse_completion({"choices": [choice]}, "0")


def test_an_unknown_finish_reason_is_an_error() -> None:
    with pytest.raises(ValueError, match="finish_reason must be one of .*, got 'repetition'"):
        parse_completion({"choices": [{**ANSWER["choices"][0], "finish_reason": "repetition"}]}, "0")


def test_transient_faults_are_retried_with_the_key() -> None:
    seen: list[tuple[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        if len(seen) == 1:
            return web.Response(status=503, text="no workers")
        if len(seen) == 2:
            return web.Response(status=429)
        if len(seen) == 3:
            request.transport.abort()  # type: ignore[union-attr]
        if len(seen) == 4:
            return web.Response(text="<html>busy</html>", headers={"x-weight-versions": "2"})
        return web.json_response(ANSWER, headers={"x-weight-versions": "2"})

    result = serve(handler, generate())
    assert result.token_ids == [8, 10, 2]
    assert result.weight_versions == [2]
    assert len(seen) == 5
    assert seen[0] == ("Bearer k", request_body([1, 2], {"max_new_tokens": 4}, 3))
    assert seen[4] == seen[0], "a retry is the same request, with the same seed"


def test_an_answer_that_never_is_json_is_named() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>busy</html>", headers={"x-weight-versions": "2"})

    with pytest.raises(TimeoutError, match=r"/v1/completions must answer with JSON, got .*<html>busy"):
        serve(handler, generate(deadline_s=0.5))


def test_a_refusal_is_an_error_at_once() -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(request.path)
        return web.Response(status=400, text="prompt too long")

    with pytest.raises(ValueError, match="got HTTP 400: prompt too long"):
        serve(handler, generate())
    assert calls == ["/v1/completions"]


@pytest.mark.parametrize("kind", ["fails", "hangs"])
def test_the_deadline_is_kept_and_named(kind: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        if kind == "hangs":
            await asyncio.sleep(1)
        return web.Response(status=500, text="broken")

    async def ask(client: VllmEngineClient) -> float:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"--rollout-deadline-s 0\.5.*the last fault was"):
            await generate(deadline_s=0.5)(client)
        return time.monotonic() - began

    assert 0.4 < serve(handler, ask) < 1.5


def test_no_server_at_all_is_a_timeout() -> None:
    client = VllmEngineClient(f"http://127.0.0.1:{free_port('127.0.0.1')}", "k")
    with pytest.raises(TimeoutError, match="ClientConnectorError|Cannot connect"):
        asyncio.run(client.generate([1], {}, seed=0, deadline_s=0.3))


def test_abort_reaches_every_worker() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(f"{request.method} {request.path}")
        base = f"http://{request.host}"
        return web.json_response({"workers": [{"url": f"{base}/a"}, {"url": f"{base}/b"}]})

    serve(handler, lambda client: client.abort_all())
    assert seen[0] == "GET /workers"
    assert sorted(seen[1:]) == ["POST /a/abort_requests", "POST /b/abort_requests"]


def test_a_client_travels_and_hides_its_key() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(ANSWER, headers={"x-weight-versions": "0"})

    async def ask(client: VllmEngineClient) -> GenerateResult:
        await generate()(client)
        copy = pickle.loads(pickle.dumps(client))
        try:
            return await generate()(copy)
        finally:
            await copy.close()

    assert serve(handler, ask).text == "46"


def test_the_command_line_of_an_engine_holds_no_secret_and_user_flags_come_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {"model_path": "model", "log_path": "log", "weight_dir": "/weights"}
    spec = EngineSpec(**made, run_key="s3cret", port=9, vllm_argv=("--max-num-seqs", "7"), env={"A": "1"})
    words = EngineServer(spec).command()
    assert "s3cret" not in " ".join(words)
    assert "s3cret" not in repr(spec)
    assert words[-2:] == ["--max-num-seqs", "7"]
    assert "--max-num-seqs=512" not in words, "a flag that is given replaces ours"
    chunked = EngineSpec(**made, run_key="k", vllm_argv=("--enable-chunked-prefill",))
    assert "--no-enable-chunked-prefill" not in EngineServer(chunked).command()
    env = EngineServer(spec).environment()
    assert (env["VIME_RUN_KEY"], env["VIME_WEIGHT_DIR"], env["A"]) == ("s3cret", "/weights", "1")
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    gpu = EngineSpec(**made, run_key="k", device="cuda", dtype="bfloat16")
    assert "--enforce-eager" not in EngineServer(gpu).command()
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)  # vLLM sets it where it is imported
    assert EngineServer(gpu).environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert EngineServer(gpu).environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "a user's choice stays"


def test_request_times_are_asked_for() -> None:
    made = {"model_path": "model", "log_path": "log", "weight_dir": "/weights", "run_key": "k"}
    asked = "--enable-per-request-metrics"
    assert asked in EngineServer(EngineSpec(**made)).command()
    quiet = EngineSpec(**made, vllm_argv=("--disable-log-stats",))
    assert asked not in EngineServer(quiet).command(), "vLLM refuses to start with both"
