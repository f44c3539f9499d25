"""Tests a prefill engine and a decode engine behind the real router, on CPUs with the connector for shared files.

The tests share the engines and run in the order of the file. The decode engine without prefill engines is the one
engine that serves both.
"""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_fixtures import Stack, answered, hf_log_probs, metric, server_of

from slime.protocols import GenerateResult
from vime.pool.router import RouterSpec
from vime.vllm.caches.connector import FOLDER
from vime.vllm.pool import VllmEnginePool

pytestmark = pytest.mark.e2e
PROMPT = [4 + index % 40 for index in range(300)]
BLOCKS = 256
"""Tokens of the prompt in full blocks of an engine on CPUs."""


class Pair(Stack):
    """A pool with a prefill engine and a decode engine."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (spec,) = (member.spec for member in self.pool._members)
        specs = [
            replace(spec, index=index, role=role, log_path=str(root / f"engine-{index}.log"))
            for index, role in enumerate(("prefill", "decode"))
        ]
        router = RouterSpec(run_key=self.key, log_path=str(root / "router.log"))
        self.pool = VllmEnginePool(specs, router, source=self, health_check_interval_s=5)

    def url(self, role: str) -> str:
        (found,) = (m.control.url for m in self.pool.state.serving_members() if m.spec.role == role)
        return found

    def prompts(self) -> float:
        """Returns the number of requests that the prefill engine has answered."""
        return answered(self.url("prefill"), self.key)

    def alone(self, prompt: list[int]) -> GenerateResult:
        """Returns the answer of the decode engine that computes the prompt itself."""
        (decode,) = (m.control for m in self.pool.state.serving_members() if m.spec.role == "decode")
        decode.use_prefill_engines([])
        decode.reset_prefix_cache()
        result = greedy(self, prompt)
        decode.reset_prefix_cache()
        self.pool.state.send_prefills()
        return result


def greedy(pair: Pair, prompt: list[int]) -> GenerateResult:
    return pair.generate(prompt, temperature=0.0, max_new_tokens=12, ignore_eos=True)


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("prefill"))
    pair.pool.start()
    pair.push(pair.checkpoint)
    yield pair
    pair.pool.stop()


def check_equal(pair: Pair, weights: Path) -> None:
    """Both ways give the same tokens and log-probs, and the prefill engine computes the prompt of one of them."""
    before = pair.prompts()
    alone = pair.alone(PROMPT)
    assert pair.prompts() == before and alone.cached_tokens == 0
    together = greedy(pair, PROMPT)
    assert pair.prompts() == before + 1
    assert together.cached_tokens == BLOCKS, "the decode engine took the full blocks"
    assert together.token_ids == alone.token_ids
    assert together.weight_versions == alone.weight_versions == [pair.version]
    close = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(torch.tensor(together.log_probs), torch.tensor(alone.log_probs), **close)
    expected = hf_log_probs(weights, PROMPT, together.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(together.log_probs), expected, atol=1e-3, rtol=0)


def test_two_engines_answer_as_one_does(pair: Pair) -> None:
    check_equal(pair, pair.checkpoint)


def test_a_group_costs_one_prefill(pair: Pair) -> None:
    before, queries = pair.prompts(), metric(pair.url("prefill"), pair.key, "prompt_tokens_total")
    prompt = [*PROMPT[:280], 7, 7]
    results = pair.generate_all([prompt] * 6, max_new_tokens=4, ignore_eos=True)
    assert pair.prompts() == before + 1
    assert metric(pair.url("prefill"), pair.key, "prompt_tokens_total") - queries == len(prompt)
    assert [result.cached_tokens for result in results] == [BLOCKS] * 6
    assert len({tuple(result.token_ids) for result in results}) > 1, "the seeds differ"


def test_both_engines_get_the_weights_and_drop_the_caches_of_older_ones(pair: Pair) -> None:
    pair.push(pair.other)
    assert not [*(pair.weight_dir / FOLDER).glob("*/*")], "no stored prompt is left"
    check_equal(pair, pair.other)


def test_updates_wait_for_transfers_and_hold_new_ones_back(pair: Pair) -> None:
    """Requests arrive all the time while weights change, and each answer has the log-probs of one version."""
    found: list[GenerateResult] = []

    def send() -> None:
        for index in range(12):
            found.append(pair.generate([*PROMPT[:200], index], max_new_tokens=2, temperature=0.0))

    thread = threading.Thread(target=send)
    thread.start()
    for weights in (pair.checkpoint, pair.other, pair.checkpoint, pair.other):
        pair.push(weights)
    thread.join()
    assert len(found) == 12
    for index, result in enumerate(found):
        if len(result.weight_versions) == 1:
            weights = pair.other if result.weight_versions[0] % 2 else pair.checkpoint
            expected = hf_log_probs(weights, [*PROMPT[:200], index], result.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-3, rtol=0)


def test_a_killed_prefill_engine_is_replaced_and_missed_by_nobody(pair: Pair) -> None:
    """Until its replacement serves, the decode engine computes prompts itself."""
    url = pair.url("prefill")
    os.kill(server_of(url).pid, signal.SIGKILL)
    alone = greedy(pair, PROMPT)
    expected = hf_log_probs(pair.other, PROMPT, alone.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(alone.log_probs), expected, atol=1e-3, rtol=0)
    wait_for(lambda: len(pair.pool.engine_urls) == 2 and pair.url("prefill") != url)
    check_equal(pair, pair.other)


@pytest.mark.slow
def test_a_killed_decode_engine_finds_the_prefill_engine_again(pair: Pair) -> None:
    pair.push(pair.other)
    url = pair.url("decode")
    os.kill(server_of(url).pid, signal.SIGKILL)
    wait_for(lambda: url not in pair.pool.engine_urls)
    wait_for(lambda: len(pair.pool.engine_urls) == 2)
    with pytest.raises((OSError, http.client.HTTPException)):
        answered(url, pair.key)
    check_equal(pair, pair.other)
