"""Tests one real engine behind the real router: keys, log-probs, seeds, weight updates, aborts, restarts.

The tests share the engine, which still serves after them, and run in the order of the file.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil
import pytest
import torch
from engine_fixtures import EOS_ID, Stack, engine_core_of, hf_log_probs, publish_checkpoint, status
from process_names import command_line
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from slime.protocols import GenerateResult, WeightUpdate
from slime.weight_sync.transfer import load
from vime.pool.asgi import health_prefix
from vime.pool.control import ControlError
from vime.vllm.cpu.engine import MOST_CACHE_BYTES

pytestmark = pytest.mark.e2e
KEY = Stack.key
PROMPT = [14, 5, 8, 13, 21, 30]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("engine"))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    stack.pool.start()
    processes = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    stack.resident_at_start = resident(stack)
    assert len(processes) >= 6, "supervisors, API server, engine core, router, key server, gateway"
    yield stack
    stack.pool.stop()
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert left == []
    assert psutil.wait_procs(processes, timeout=5)[1] == []


def resident(stack: Stack) -> int:
    """Returns the resident bytes of the engine core's process."""
    return int(engine_core_of(stack.control.url).memory_info().rss)


def test_every_route_of_the_engine_needs_the_key(stack: Stack) -> None:
    url = stack.pool.engine_urls[0]
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    routes = json.loads(connection.getresponse().read())["paths"]
    connection.close()
    assert {"/pause", "/update_weights", "/health", "/v1/completions", "/collective_rpc"} <= routes.keys()
    probes = [(method.upper(), path) for path, methods in routes.items() for method in methods]
    probes += [("GET", p) for p in ("/", "/docs", "/redoc", "/openapi.json", "/metrics", "/ping", "/nowhere")]
    probes += [("OPTIONS", "/v1/completions"), ("HEAD", "/health")]
    for method, path in probes:
        assert status(url, method, path, body={}) == 401, (method, path)
        assert status(url, method, path, key="wrong", body={}) == 401, (method, path)
    assert status(url, "GET", "/health", key=KEY) == 200


def test_the_path_given_to_the_router_opens_health_only(stack: Stack) -> None:
    url = stack.pool.engine_urls[0] + health_prefix(KEY)
    assert status(url, "GET", "/health") == 200
    for method, path in [
        ("POST", "/health"),
        ("POST", "/pause"),
        ("GET", "/v1/models"),
        ("GET", "/health/../metrics"),
    ]:
        assert status(url, method, path) == 401, (method, path)
    assert status(stack.pool.engine_urls[0], "GET", health_prefix("wrong") + "/health") == 401


def test_every_route_of_the_router_needs_the_key(stack: Stack) -> None:
    url, engine = stack.pool.router_url, stack.pool.engine_urls[0]
    get = [
        "/health",
        "/liveness",
        "/readiness",
        "/health_generate",
        "/workers",
        "/list_workers",
        "/v1/models",
    ]
    get += [
        "/get_server_info",
        "/get_model_info",
        "/get_loads",
        "/metrics",
        "/engine_metrics",
        "/nowhere",
        "/",
    ]
    probes: list[tuple[str, str, object]] = [("GET", path, None) for path in get]
    post = [
        "/add_worker?url=http://127.0.0.1:1",
        f"/remove_worker?url={engine}",
        "/flush_cache",
        "/pause",
        "/sleep",
    ]
    post += ["/update_weights", "/abort_requests", "/v1/messages", "/nowhere"]
    probes += [("POST", path, {}) for path in post]
    probes += [
        ("POST", "/workers", {"url": engine}),
        ("DELETE", f"/workers/{quote(engine, safe='')}", None),
        ("POST", "/v1/completions", {"model": "policy", "prompt": [5]}),
        ("POST", "/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/generate", {"text": "a"}),
        ("POST", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
        ("POST", "/v1/embeddings", {"model": "policy", "input": "a"}),
    ]
    for method, path, body in probes:
        assert status(url, method, path, body=body) == 401, (method, path)
        assert status(url, method, path, key="wrong", body=body) == 401, (method, path)
    assert status(url, "GET", "/workers", key=KEY) == 200
    assert stack.pool.engine_urls == stack.pool._router.engines() == [engine]


def test_the_open_page_of_the_router_holds_counters_only(stack: Stack) -> None:
    """vllm-router always serves its Prometheus page. The page must contain nothing that opens another route."""
    ours = {stack.pool._router.spec.port, stack.pool._router.spec.gateway_port}
    key_server_and_page = [
        connection.laddr.port
        for process in psutil.Process().children(recursive=True)
        if "router_main" in command_line(process)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port not in ours
    ]
    assert len(key_server_and_page) == 2
    answers = [status(f"http://127.0.0.1:{port}", "GET", "/") for port in key_server_and_page]
    assert sorted(answers) == [200, 401]
    page = key_server_and_page[answers.index(200)]
    with urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics") as answer:
        text = answer.read().decode()
    assert KEY not in text
    assert all(line.startswith(("#", "vllm_router_")) for line in text.splitlines() if line)


def test_nothing_listens_beyond_loopback_and_no_command_line_holds_the_key(stack: Stack) -> None:
    for process in psutil.Process().children(recursive=True):
        assert KEY not in command_line(process)
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), process.cmdline()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(stack: Stack, temperature: float) -> None:
    results = stack.generate_all([PROMPT] * 16, temperature=temperature, max_new_tokens=12, ignore_eos=True)
    worst = 0.0
    for result in results:
        assert len(result.token_ids) == len(result.log_probs) == 12
        expected = hf_log_probs(stack.checkpoint, PROMPT, result.token_ids, temperature)
        worst = max(worst, (torch.tensor(result.log_probs) - expected).abs().max().item())
    assert worst < 1e-4
    print(f"largest difference at temperature {temperature}: {worst:.2e}")


def test_a_seed_decides_the_sample_whatever_runs_beside_it(stack: Stack) -> None:
    alone = stack.generate(PROMPT, seed=5, max_new_tokens=16)
    crowd = stack.generate_all([PROMPT] * 32, seed=0, max_new_tokens=16)
    assert crowd[5].token_ids == alone.token_ids
    assert len({tuple(result.token_ids) for result in crowd}) > 16


def test_sampling_parameters_reach_the_engine(stack: Stack) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint)
    greedy = stack.generate(PROMPT, temperature=0.0, max_new_tokens=10, ignore_eos=True)
    assert (greedy.finish_reason, len(greedy.token_ids)) == ("length", 10)
    assert greedy.prompt_tokens == len(PROMPT)
    assert greedy.text == tokenizer.decode(greedy.token_ids, skip_special_tokens=True)
    third = greedy.token_ids[2]
    first_place = greedy.token_ids.index(third)
    stopped = stack.generate(
        PROMPT, temperature=0.0, max_new_tokens=10, ignore_eos=True, stop_token_ids=[third]
    )
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", greedy.token_ids[: first_place + 1])
    assert all(
        EOS_ID not in result.token_ids[:5]
        for result in stack.generate_all([PROMPT] * 64, max_new_tokens=6, min_new_tokens=5)
    )
    top = stack.generate(PROMPT, temperature=2.0, top_k=1, max_new_tokens=10, ignore_eos=True)
    assert (top.token_ids, top.log_probs) == (greedy.token_ids, [0.0] * 10), "one token left to sample from"


def test_an_answer_tells_how_long_its_request_waited(stack: Stack) -> None:
    """A paused engine accepts requests and holds them."""
    assert stack.generate(PROMPT, max_new_tokens=1).decode_tokens_per_s is None
    stack.control.pause("keep")
    resume = threading.Timer(1.0, stack.control.resume)
    resume.start()
    began = time.perf_counter()
    waited = stack.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    whole_s = time.perf_counter() - began
    resume.join()
    assert waited.queue_s is not None and waited.decode_tokens_per_s is not None
    assert 0.7 < waited.queue_s < whole_s
    decode_s = 23 / waited.decode_tokens_per_s
    assert waited.queue_s + decode_s < whole_s
    at_once = stack.generate(PROMPT, max_new_tokens=24).queue_s
    assert at_once is not None and 0 <= at_once < 0.5


def test_log_probs_are_spelled_for_who_asks_for_words(stack: Stack) -> None:
    """Our own requests get log-probs as numbers, see group_wire. A hook that uses the router may want vLLM's own
    format."""
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "seed": 4}
    asked = urllib.request.Request(
        f"{stack.pool.router_url}/v1/completions",
        json.dumps(body | {"return_token_ids": True, "logprobs": 1}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        spelled = json.load(answer)["choices"][0]
    numbers = spelled["logprobs"]["token_logprobs"]
    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint)
    assert spelled["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in spelled["token_ids"]]
    ours = stack.generate(PROMPT, seed=4, max_new_tokens=6, ignore_eos=True)
    assert (ours.token_ids, ours.log_probs, ours.text) == (spelled["token_ids"], numbers, spelled["text"])


def test_what_the_engine_refuses_is_an_error_at_once(stack: Stack) -> None:
    with pytest.raises(ValueError, match="must fit the engine's context of 512 tokens, got 600 and up to"):
        stack.generate([5] * 600)
    with pytest.raises(ValueError, match="HTTP 400: .*min_tokens must be less than or equal to max_tokens"):
        stack.generate(PROMPT, max_new_tokens=3, min_new_tokens=4)
    with pytest.raises(ValueError, match="the engine must accept the request, got (?!HTTP).*99999"):
        stack.generate([5, 99999])


def test_an_engine_stops_what_nobody_waits_for(stack: Stack) -> None:
    async def give_up() -> None:
        client = stack.pool.client()
        params = {"temperature": 1.0, "max_new_tokens": 480, "ignore_eos": True}
        asked = asyncio.gather(*(client.generate(PROMPT, params, seed=i, deadline_s=60) for i in range(4)))
        while not stack.metric("num_requests_running"):
            await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.wait([asked])
        await client.close()

    before = stack.metric("generation_tokens_total")
    asyncio.run(give_up())
    while stack.metric("num_requests_running"):
        time.sleep(0.05)
    assert 0 < stack.metric("generation_tokens_total") - before < 4 * 480


def test_an_update_changes_answers_and_version(stack: Stack) -> None:
    assert stack.control.weight_version() == stack.version == -1
    before = stack.generate(PROMPT, seed=3, ignore_eos=True)
    assert before.weight_versions == [-1]
    stack.push(stack.checkpoint)
    freed = stack.resident_at_start - resident(stack)
    assert freed > 0.8 * MOST_CACHE_BYTES, f"an empty cache must take no memory, got {freed >> 20} MiB freed"
    same = stack.generate(PROMPT, seed=3, ignore_eos=True)
    assert (same.token_ids, same.weight_versions) == (before.token_ids, [0])
    stack.push(stack.other)
    after = stack.generate(PROMPT, seed=3, ignore_eos=True)
    assert after.weight_versions == [1]
    expected = hf_log_probs(stack.other, PROMPT, after.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(after.log_probs), expected, atol=1e-4, rtol=0)
    assert stack.control.weight_version() == 1


def test_an_update_during_a_request_is_seen_in_it(stack: Stack) -> None:
    """With pause "keep", the tokens before the update come from the old weights. The tokens after it come from the
    new weights, with keys and values of the new weights only."""
    stack.push(stack.other)
    found: list[GenerateResult] = []
    thread = threading.Thread(
        target=lambda: found.append(stack.generate(PROMPT, seed=7, max_new_tokens=480, ignore_eos=True))
    )
    before = stack.metric("generation_tokens_total")
    thread.start()
    while stack.metric("generation_tokens_total") == before:
        time.sleep(0.01)
    update = stack.push(stack.checkpoint)  # 480 tokens take 0.6 s or more
    thread.join()
    result = found[0]
    assert len(result.weight_versions) == 2 and result.weight_versions[1] == update.version
    given = torch.tensor(result.log_probs)
    old = (given - hf_log_probs(stack.other, PROMPT, result.token_ids, 1.0)).abs()
    new = (given - hf_log_probs(stack.checkpoint, PROMPT, result.token_ids, 1.0)).abs()
    versions = result.token_columns["token_versions"]
    switch = versions.index(update.version)
    assert 0 < switch < 480
    assert versions == [update.version - 1] * switch + [update.version] * (480 - switch)
    assert old[:switch].max() < 1e-3
    assert new[switch:].max() < 1e-3


def test_abort_returns_what_there_is(stack: Stack) -> None:
    async def run() -> list[GenerateResult]:
        client = stack.pool.client()
        sampling = {"temperature": 1.0, "max_new_tokens": 490, "ignore_eos": True}
        tasks = [
            asyncio.create_task(client.generate(PROMPT, sampling, seed=i, deadline_s=60)) for i in range(8)
        ]
        await asyncio.sleep(0.3)
        await client.abort_all()
        results = await asyncio.gather(*tasks)
        await client.close()
        return results

    results = asyncio.run(run())
    assert [result.finish_reason for result in results] == ["abort"] * 8
    for result in results:
        assert 0 < len(result.token_ids) < 490
        expected = hf_log_probs(stack.checkpoint, PROMPT, result.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-3, rtol=0)


def test_files_that_must_not_be_loaded_are_refused(stack: Stack, tmp_path: Path) -> None:
    state = load_file(stack.other / "model.safetensors")
    lacking = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    misshapen = state | {"model.norm.weight": torch.ones(65)}
    inside = stack.weight_dir
    save_file(state, tmp_path / "outside.safetensors")
    save_file(lacking, inside / "lacking.safetensors")
    save_file(misshapen, inside / "misshapen.safetensors")
    (inside / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    before = stack.generate(PROMPT, seed=1)
    for path, message in [
        (tmp_path / "outside.safetensors", "must lie under"),
        (inside / "link.safetensors", "must lie under"),
        (inside / ".." / "weights" / ".." / "x", "must lie under"),
        (inside / "lacking.safetensors", "model.norm.weight missing from the file"),
        (inside / "misshapen.safetensors", "model.norm.weight must have shape"),
    ]:
        with pytest.raises(ControlError, match=message):
            load(stack.control, WeightUpdate(99, "disk", {"path": str(path)}))
    after = stack.generate(PROMPT, seed=1)
    assert (after.token_ids, after.log_probs) == (before.token_ids, before.log_probs)
    assert after.weight_versions == before.weight_versions


def test_a_file_that_changed_after_hashing_is_refused(stack: Stack) -> None:
    update = publish_checkpoint(stack.other, stack.weight_dir, 50, checksums=True)
    state = load_file(update.info["path"])
    state["model.layers.1.mlp.up_proj.weight"][3, 7] += 1e-6
    save_file(state, update.info["path"])
    with pytest.raises(ControlError, match=r"1 tensors that differ: model\.layers\.1\.mlp\.up_proj\.weight"):
        stack.publish(update)


def test_a_corrupted_live_tensor_is_found(stack: Stack) -> None:
    """vLLM's own reset_weights sets live parameters to zero. A comparison without a load must name them."""
    update = stack.push(stack.checkpoint)
    compare = {**update.message(), "info": {**update.info, "load": False}}
    control = stack.control

    def check() -> None:
        control.start_weight_update()
        control.update_weights(compare)
        control.finish_weight_update(update.version)

    check()
    control._post("/collective_rpc", {"method": "reset_weights"})
    with pytest.raises(ControlError, match=r"live weights must equal.*model\.embed_tokens\.weight"):
        check()
    stack.push(stack.checkpoint)
    check()


from cache_cases import *  # noqa: E402, F403 (tests)
from last_cases import *  # noqa: E402, F403 (tests)
