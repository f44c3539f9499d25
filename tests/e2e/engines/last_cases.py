"""Has the last tests on a shared engine: parts of answers, and tests that put the engine to sleep and kill it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch
from engine_fixtures import Stack, hf_log_probs, server_of

from slime.protocols import TOP, AnswerParts, GenerateResult
from slime.rollout.stream.parts import AnswersSoFar
from vime.pool.control import SERVED_MODEL_NAME
from vime.pool.engine_server import Standby
from vime.vllm.group_wire import ALIVE, ALIVE_S, SAMPLES, Frames

PROMPT = [14, 5, 8, 13, 21, 30]


def test_parts_of_an_answer_are_its_first_tokens(stack: Stack) -> None:
    """Two samples of one request report their tokens every 0.1 s, with log-probs, versions and the likeliest ids."""
    params = {"temperature": 1.0, "max_new_tokens": 480, "ignore_eos": True}
    found: dict[int, AnswersSoFar] = {seed: AnswersSoFar(0.1) for seed in (1, 2)}

    async def run() -> list[GenerateResult]:
        client = stack.pool.client()
        asked = [
            client.generate(
                *(PROMPT, params),
                seed=seed,
                deadline_s=60,
                columns={TOP: 2},
                parts=AnswerParts(0.1, partial(answers.take, "x")),
            )
            for seed, answers in found.items()
        ]
        results = await asyncio.gather(*asked)
        await client.close()
        return results

    for result, answers in zip(asyncio.run(run()), found.values(), strict=True):
        part = answers.read("x")
        assert part is not None and 0 < (count := len(part.token_ids)) < 480
        assert part.token_ids == result.token_ids[:count] and part.log_probs == result.log_probs[:count]
        assert (
            part.token_columns["token_versions"] == result.weight_versions * count
            and part.finish_reason == "abort"
        )
        assert [array.shape for array in part.columns[TOP]] == [(count, 2)] * 2
        assert (part.columns[TOP][0] == result.columns[TOP][0][:count]).all()


def test_sleeping_engines_answer_when_they_wake(stack: Stack) -> None:
    stack.pool.sleep()
    found: list[GenerateResult] = []
    thread = threading.Thread(target=lambda: found.append(stack.generate(PROMPT, seed=2)))
    thread.start()
    time.sleep(1.5)
    assert found == []
    stack.pool.wake()
    thread.join()
    assert found[0].log_probs


def test_a_paused_engine_says_that_it_still_has_the_request(stack: Stack) -> None:
    """The signs of life come through the router, which must not hold them back."""
    stack.control.pause()
    address = urlsplit(stack.pool.router_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=4 * ALIVE_S)
    samples = {"shared": {}, "each": [{"max_tokens": 2, "min_tokens": 2}]}
    body = json.dumps({"model": SERVED_MODEL_NAME, "prompt": PROMPT, "stream": True, SAMPLES: samples})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {stack.key}"}
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    assert answer.read(len(ALIVE)) == ALIVE
    stack.control.resume()
    frames = Frames()
    assert [len(sample.token_ids) for sample in frames.feed(answer.read())] == [8]
    connection.close()


def test_a_killed_engine_comes_back_with_the_last_weights(stack: Stack) -> None:
    """The new engine is the process that had imported vLLM before. Its environment differs only in the engine's
    name."""
    stack.pool.state.standby = standby = Standby(0.01)
    update = stack.push(stack.other)
    log = Path(stack.pool.state.members[0].spec.log_path).with_name("engine-standby.log")
    while (waiting := standby._process) is None or "the imports are done" not in log.read_text():
        time.sleep(0.05)
    url = stack.pool.engine_urls[0]
    found: list[GenerateResult] = []
    thread = threading.Thread(
        target=lambda: found.extend(
            stack.generate_all([PROMPT] * 16, seed=0, max_new_tokens=300, ignore_eos=True, deadline_s=200)
        )
    )
    thread.start()
    time.sleep(0.2)  # 300 tokens take a second
    (imported,) = psutil.Process(waiting.pid).children()
    mib, killed = imported.memory_full_info().uss / 2**20, time.monotonic()
    os.kill(server_of(url).pid, signal.SIGKILL)
    while stack.pool.engine_urls in ([url], []):
        time.sleep(0.05)
    seconds, load = time.monotonic() - killed, os.getloadavg()[0]
    print(f"the engine is back after {seconds:.1f} s; the standby had {mib:.0f} MiB; load {load:.1f}")
    thread.join()
    assert stack.pool.engine_urls != [url]
    (server,) = psutil.Process(waiting.pid).children()
    assert server == server_of(stack.pool.engine_urls[0])
    assert len(found) == 16
    for result in found[:4]:
        assert result.weight_versions == [update.version]
        expected = hf_log_probs(stack.other, PROMPT, result.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-3, rtol=0)
    stack.pool.check_health()
