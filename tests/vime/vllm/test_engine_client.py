"""Tests requests, retries and errors of the client, with a local HTTP server that fails on purpose."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from slime.checkpoints.divergence import DivergedError
from slime.protocols import VERSIONS, GenerateResult
from vime.pool.process import free_port
from vime.vllm import client as client_module
from vime.vllm.client import VllmEngineClient, parse_result, request_fields
from vime.vllm.group_wire import ALIVE, SampleAnswer, frame, packed
from vime.vllm.server import VllmServer, VllmSpec


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


ANSWER = SampleAnswer(0, ints(8, 10, 2), floats(-0.5, -0.25, 0.0), "46", "stop", [2], 5, 4)


def changed(**fields: Any) -> SampleAnswer:
    return msgspec.structs.replace(ANSWER, **fields)


def result(answer: SampleAnswer) -> GenerateResult:
    return parse_result(answer, 5, {})


def serve(handler: Callable[[web.Request], Any], ask: Callable[[VllmEngineClient], Any]) -> Any:
    """Returns the result of `ask` when `handler` is the router."""

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
    shared, own = request_fields(given, 11)
    assert shared == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_tokens": 2,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    assert own == {"seed": 11, "max_tokens": 7}
    assert request_fields({"no_stop_trim": False}, 0)[0]["include_stop_str_in_output"] is False
    with pytest.raises(ValueError, match=r"sampling parameters must be among .*, got \['top_q'\]"):
        request_fields({"top_q": 1}, 0)


def test_an_answer_becomes_a_record() -> None:
    more = {"queue_s": 0.25, "decode_tokens_per_s": 50.0, "speculation": (2, 4, 1)}
    found = result(
        changed(weight_versions=[3, 4], columns={VERSIONS: packed((np.int32([3, 4, 4]),))}, **more)
    )
    assert found.token_columns == {"token_versions": [3, 4, 4]}
    assert found == GenerateResult(
        token_ids=[8, 10, 2],
        log_probs=[-0.5, -0.25, 0.0],
        text="46",
        finish_reason="stop",
        weight_versions=[3, 4],
        prompt_tokens=5,
        cached_tokens=4,
        queue_s=0.25,
        decode_tokens_per_s=50.0,
        speculation=(2, 4, 1),
    )


def test_a_log_prob_that_is_nan_names_the_weights() -> None:
    spoiled = changed(log_probs=floats(-0.5, float("nan"), 0.0), weight_versions=[3, 4])
    rule = "log-probs of the engine must be finite, got nan at token 1 of a response with the weights after rollout 3"
    with pytest.raises(DivergedError, match=rule) as error:
        result(spoiled)
    assert error.value.rollout_id == 3
    with pytest.raises(DivergedError, match="with the first weights"):
        result(changed(log_probs=spoiled.log_probs, weight_versions=[0]))


@pytest.mark.parametrize("log_probs", [b"", floats(-0.5)])
def test_a_missing_log_prob_is_an_error(log_probs: bytes) -> None:
    with pytest.raises(ValueError, match="one log-prob per token"):
        result(changed(log_probs=log_probs))


def test_an_unknown_finish_reason_is_an_error() -> None:
    with pytest.raises(ValueError, match="finish_reason must be one of .*, got 'repetition'"):
        result(changed(finish_reason="repetition"))


def test_a_sample_that_the_engine_refuses_is_an_error() -> None:
    with pytest.raises(ValueError, match="the engine must accept the request, got token 99 is unknown"):
        result(SampleAnswer(0, error="token 99 is unknown"))


def test_samples_of_one_prompt_and_moment_share_a_request() -> None:
    """Each sample gets the answer of its own seed as soon as it has finished."""
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        each = body["vime_samples"]["each"]
        for place in reversed(range(len(each))):
            whole = frame(changed(place=place, text=str(each[place]["seed"])))
            await response.write(whole[:7])  # a frame may come in pieces
            await asyncio.sleep(0.02)
            await response.write(whole[7:])
        return response

    async def ask(client: VllmEngineClient) -> list[str]:
        order: list[str] = []

        async def one(prompt: list[int], seed: int) -> None:
            params = {"max_new_tokens": 4 + seed, "temperature": 0.5}
            order.append((await client.generate(prompt, params, seed=seed, deadline_s=5)).text)

        await asyncio.gather(*(one([1, 2], seed) for seed in range(3)), one([3], 7))
        return order

    assert sorted(serve(handler, ask)) == ["0", "1", "2", "7"]
    seen.sort(
        key=lambda body: len(body["prompt"]), reverse=True
    )  # two connections may arrive in either order
    assert [body["prompt"] for body in seen] == [[1, 2], [3]]
    shared = {"include_stop_str_in_output": True, "temperature": 0.5}
    each = [{"seed": seed, "max_tokens": 4 + seed} for seed in range(3)]
    assert seen[0]["vime_samples"] == {"shared": shared, "each": each}
    of_group = [text for text in serve(handler, ask) if text != "7"]
    assert of_group == ["2", "1", "0"], "the last frame is that of the first sample"


def test_only_what_an_answer_lacks_is_asked_for_again() -> None:
    seen: list[list[int]] = []

    async def handler(request: web.Request) -> web.Response:
        seeds = [own["seed"] for own in (await request.json())["vime_samples"]["each"]]
        seen.append(seeds)
        return web.Response(body=frame(changed(text=str(seeds[0]))))  # and the connection ends

    async def ask(client: VllmEngineClient) -> list[str]:
        results = (client.generate([1], {}, seed=seed, deadline_s=5) for seed in range(3))
        return [result.text for result in await asyncio.gather(*results)]

    assert serve(handler, ask) == ["0", "1", "2"]
    later = [seed for seeds in seen[1:] for seed in seeds]
    assert seen[0] == [0, 1, 2] and 0 not in later and later.count(1) == 1
    assert later.count(2) in (1, 2)  # the second and third may be requested again together or separately


def test_a_request_ends_when_nobody_waits_for_it() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    async def ask(client: VllmEngineClient) -> None:
        both = [asyncio.create_task(client.generate([1], {}, seed=i, deadline_s=30)) for i in range(2)]
        await asyncio.sleep(0.1)
        both[0].cancel()
        await asyncio.sleep(0.1)
        assert client._sending
        both[1].cancel()
        await asyncio.sleep(0.1)
        assert not client._sending

    serve(handler, ask)


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
            return web.Response(text="<html>busy</html>")
        return web.Response(body=frame(ANSWER))

    answer = serve(handler, generate())
    assert answer.token_ids == [8, 10, 2]
    assert answer.weight_versions == [2]
    assert len(seen) == 5
    samples = {"shared": {"include_stop_str_in_output": True}, "each": [{"seed": 3, "max_tokens": 4}]}
    body = {"model": "policy", "prompt": [1, 2], "stream": True, "vime_samples": samples}
    assert seen[0] == ("Bearer k", body)
    assert seen[4] == seen[0], "a retry is the same request, with the same seed"


def test_a_lost_answer_is_asked_for_again_and_a_slow_one_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer never comes. The second answer is finished after three times the limit."""
    monkeypatch.setattr(client_module, "SILENT_S", 0.5)
    calls, answered = [], asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        calls.append(time.monotonic())
        if len(calls) == 1:
            await answered.wait()  # the server would wait a minute for a handler that never ends
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(15):
            await response.write(ALIVE)
            await asyncio.sleep(0.1)
        await response.write(frame(ANSWER))
        answered.set()
        return response

    answer = serve(handler, generate(deadline_s=20.0))
    assert answer.token_ids == [8, 10, 2]
    assert len(calls) == 2 and 0.4 < calls[1] - calls[0] < 5


def test_an_answer_that_never_is_a_frame_is_named() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>busy</html>")

    with pytest.raises(TimeoutError, match=r"a frame must begin with b'vime', got b'<html>busy"):
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
        return web.Response(body=frame(ANSWER))

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
    spec = VllmSpec(**made, run_key="s3cret", port=9, vllm_argv=("--max-num-seqs", "7"), env={"A": "1"})
    words = VllmServer(spec).command()
    assert "s3cret" not in " ".join(words)
    assert "s3cret" not in repr(spec)
    assert words[-2:] == ["--max-num-seqs", "7"]
    assert "--max-num-seqs=512" not in words, "a flag that is given replaces ours"
    chunked = VllmSpec(**made, run_key="k", vllm_argv=("--enable-chunked-prefill",))
    assert "--no-enable-chunked-prefill" not in VllmServer(chunked).command()
    env = VllmServer(spec).environment()
    assert (env["VIME_RUN_KEY"], env["VIME_WEIGHT_DIR"], env["A"]) == ("s3cret", "/weights", "1")
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    gpu = VllmSpec(**made, run_key="k", device="cuda", dtype="bfloat16")
    assert "--enforce-eager" not in VllmServer(gpu).command()
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)  # vLLM sets it at import
    assert VllmServer(gpu).environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert VllmServer(gpu).environment()["OMP_NUM_THREADS"] == "1", "as in an actor of Ray"
    estimates = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
    assert VllmServer(gpu).environment()[estimates] == "0" and estimates not in env
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert VllmServer(gpu).environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "a user's choice stays"


def test_an_engine_keeps_no_pixels_of_earlier_requests() -> None:
    """Each request has its pixels. A user may choose another size."""
    made = {"model_path": "model", "run_key": "k", "log_path": "log", "weight_dir": "/weights"}
    words = VllmServer(VllmSpec(**made)).command()
    flag = "--mm-processor-cache-gb"
    assert words[words.index(flag) + 1] == "0"
    own = VllmServer(VllmSpec(**made, vllm_argv=(flag, "2"))).command()
    assert own.count(flag) == 1 and own[own.index(flag) + 1] == "2"


def test_request_times_are_asked_for() -> None:
    made = {"model_path": "model", "log_path": "log", "weight_dir": "/weights", "run_key": "k"}
    asked = "--enable-per-request-metrics"
    assert asked in VllmServer(VllmSpec(**made)).command()
    quiet = VllmSpec(**made, vllm_argv=("--disable-log-stats",))
    assert asked not in VllmServer(quiet).command(), "vLLM refuses to start with both"


def test_drafted_tokens_are_counted_where_the_engine_drafts() -> None:
    made = {"model_path": "model", "log_path": "log", "weight_dir": "/weights", "run_key": "k"}
    asked = "--per-request-spec-decode-metrics"
    assert asked not in VllmServer(VllmSpec(**made)).command(), "vLLM refuses to start without a draft"
    drafting = VllmSpec(**made, vllm_argv=("--speculative-config", "{}"))
    assert asked in VllmServer(drafting).command()
