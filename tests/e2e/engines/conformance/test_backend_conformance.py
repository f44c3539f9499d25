"""Runs one suite for every rollout backend: sampling, log-probs, aborts, pauses, versions, weight updates, faults.

One vLLM engine serves all tests. "vllm": our client through vllm-router. "sglang": the SGLang client through the real
sglang-router, to SGLang's routes of the same engine. The routes' tests (gateway_cases) and those of log-probs of
given tokens (score_cases) share the engine, too. Each test leaves the engine with the weights of `stack.checkpoint`.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from agent_cases import *  # noqa: F403 (tests)
from engine_fixtures import Stack, check_first_weights, hf_log_probs, hf_model, publish_checkpoint
from gateway_cases import *  # noqa: F403 (tests)
from process_names import command_line
from safetensors.torch import load_file
from score_cases import *  # noqa: F403 (tests)
from session_cases import *  # noqa: F403 (tests)

from slime.peers import http
from slime.protocols import KEPT_TOKENS, TOP, GenerateResult
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices
from vime.pool.control import ControlError
from vime.pool.external import ExternalEngine
from vime.pool.pool import ServerPool
from vime.pool.router import RouterSpec
from vime.sglang.control import SglangControl
from vime.sglang.pool import SglangEnginePool
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmServer, VllmSpec

pytestmark = pytest.mark.e2e
PROMPT = [14, 5, 8, 13, 21, 30]
POOLS: dict[str, type[ServerPool]] = {"vllm": VllmEnginePool, "sglang": SglangEnginePool}


@dataclass
class Served:
    """One backend's pool on the shared engine."""

    stack: Stack
    pool: ServerPool

    @property
    def control(self) -> Any:
        return self.pool.kind.control(self.pool.engine_urls[0], Stack.key)

    def publish(self, checkpoint: Path) -> int:
        """Publishes the weights of `checkpoint` and returns their version."""
        self.stack.version += 1
        update = publish_checkpoint(checkpoint, self.stack.weight_dir, self.stack.version, checksums=False)
        self.stack.parts = [update]
        self.pool.publish(update.version)
        return update.version

    def sample(
        self, *, seeds: tuple[int, ...] = (0,), prompt: list[int] = PROMPT, **params: Any
    ) -> list[GenerateResult]:
        return asyncio.run(self.sample_async(seeds, prompt, **params))

    async def generating(self) -> None:
        """Returns once the engine has generated more tokens."""
        before = await asyncio.to_thread(self.stack.metric, "generation_tokens_total")
        while await asyncio.to_thread(self.stack.metric, "generation_tokens_total") <= before + 3:
            await asyncio.sleep(0.02)

    async def sample_async(
        self,
        seeds: tuple[int, ...],
        prompt: list[int],
        *,
        deadline_s: float = 60,
        told: dict[str, int] | None = None,
        **params: Any,
    ) -> list[GenerateResult]:
        client = self.pool.client()
        sampling = {"temperature": 1.0, "max_new_tokens": 8, "stop_token_ids": [], **params}
        try:
            return await asyncio.gather(
                *(
                    client.generate(prompt, sampling, seed=s, deadline_s=deadline_s, **(told or {}))
                    for s in seeds
                )
            )
        finally:
            await client.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("conformance"), starts_empty=True)
    stack.pool.start()
    check_first_weights(stack, PROMPT)
    http.set_own_servers(http.OwnServers(**stack.pool.facts["own_servers"][0]))
    yield stack
    http.set_own_servers()
    stack.pool.stop()


@pytest.fixture(scope="module")
def sglang_pool(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEnginePool]:
    """Starts sglang-router and registers the engine of `stack` as a separately started server."""
    root, at = tmp_path_factory.mktemp("sglang"), urlsplit(stack.pool.engine_urls[0])
    spec = VllmSpec(
        model_path=str(stack.checkpoint),
        run_key=Stack.key,
        log_path=str(root / "engine.log"),
        weight_dir=str(stack.weight_dir),
        host=at.hostname or "",
        port=at.port or 0,
    )
    router = RouterSpec(run_key=Stack.key, log_path=str(root / "router.log"))
    pool = SglangEnginePool(
        [spec], router, spawn=lambda spec: ExternalEngine(spec, SglangControl), source=stack
    )
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture(params=list(POOLS))
def served(stack: Stack, sglang_pool: SglangEnginePool, request: pytest.FixtureRequest) -> Served:
    return Served(stack, stack.pool if request.param == "vllm" else sglang_pool)


def close_to_model(result: GenerateResult, checkpoint: Path, temperature: float, atol: float = 1e-4) -> None:
    expected = hf_log_probs(checkpoint, PROMPT, result.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_seeded_samples_and_their_log_probs(served: Served, temperature: float) -> None:
    first = served.sample(seeds=(3, 4, 5), temperature=temperature)
    again = served.sample(seeds=(3, 4, 5), temperature=temperature)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({tuple(one.token_ids) for one in first}) == 3
    for one in first:
        close_to_model(one, served.stack.checkpoint, temperature)
        assert one.weight_versions == [served.stack.version]
        assert one.prompt_tokens == len(PROMPT) and 0 <= one.cached_tokens < len(PROMPT)


def kept_of(result: GenerateResult) -> tuple[list[int], list[int]]:
    ids, counts = (array.tolist() for array in result.columns[KEPT_TOKENS])
    return ids, counts


def test_what_top_p_and_top_k_kept_comes_with_a_sample(stack: Stack) -> None:
    """The sets come from the model itself and have all the probability of the log-probs."""
    served = Served(stack, stack.pool)
    found = served.sample(seeds=(3, 4), temperature=0.7, top_p=0.8, told={"columns": {KEPT_TOKENS: 64}})
    (few,) = served.sample(seeds=(3,), temperature=0.7, top_k=3, told={"columns": {KEPT_TOKENS: 64}})
    (short,) = served.sample(seeds=(3,), temperature=0.7, top_p=0.95, told={"columns": {KEPT_TOKENS: 1}})
    assert KEPT_TOKENS not in served.sample(seeds=(3,), temperature=0.7, top_p=0.8)[0].columns
    for one, top_p, top_k in ((found[0], 0.8, 0), (found[1], 0.8, 0), (few, 1.0, 3)):
        with torch.no_grad():
            logits = hf_model(stack.checkpoint)(torch.tensor([PROMPT + one.token_ids])).logits[0]
        table = (logits[len(PROMPT) - 1 : -1] / 0.7).softmax(-1)
        ids, counts = kept_of(one)
        assert len(counts) == len(one.token_ids) and sum(counts) == len(ids)
        for row, token, value, count in zip(table, one.token_ids, one.log_probs, counts, strict=True):
            kept, ids = ids[:count], ids[count:]
            order = row.sort(descending=True)
            before = order.values.cumsum(0) - order.values
            wanted = order.indices[: top_k or int((before < top_p).sum())].tolist()
            if count:  # a set without entries has more than 64 ids
                assert set(kept) == set(wanted) and token in kept and len(kept) == count
                assert value == pytest.approx(float((row[token] / row[kept].sum()).log()), abs=1e-4)
            else:
                assert len(wanted) > 64
    assert any(counts for counts in kept_of(found[0])[1]) and kept_of(few)[1] == [3] * len(few.token_ids)
    assert set(kept_of(short)[1]) <= {0, 1}  # one id, or a set that does not fit


def test_the_likeliest_tokens_come_with_a_sample(stack: Stack) -> None:
    """The ids are the model's most likely ones, in their order, with log-probs over the whole vocabulary."""
    served = Served(stack, stack.pool)
    for one in served.sample(seeds=(3, 4), temperature=0.7, told={"columns": {TOP: 5}}):
        with torch.no_grad():
            logits = hf_model(stack.checkpoint)(torch.tensor([PROMPT + one.token_ids])).logits[0]
        table = torch.log_softmax(logits[len(PROMPT) - 1 : -1] / 0.7, -1)
        ids, log_probs = one.columns[TOP]
        assert ids.shape == log_probs.shape == (len(one.token_ids), 5)
        torch.testing.assert_close(torch.tensor(log_probs), table.topk(5).values, atol=1e-4, rtol=0)
        own = table.gather(1, torch.tensor(ids).long())
        torch.testing.assert_close(torch.tensor(log_probs), own, atol=1e-4, rtol=0)
    assert TOP not in served.sample(seeds=(3,))[0].columns


def test_greedy_takes_the_likeliest_token(served: Served) -> None:
    (one,) = served.sample(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    assert (one.finish_reason, len(one.token_ids)) == ("length", 12)
    with torch.no_grad():
        logits = hf_model(served.stack.checkpoint)(torch.tensor([PROMPT + one.token_ids])).logits[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == one.token_ids


def test_all_backends_give_the_same_samples(stack: Stack, sglang_pool: SglangEnginePool) -> None:
    for params in ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "min_new_tokens": 6}):
        ours, theirs = (
            Served(stack, pool).sample(seeds=(7, 8, 9), max_new_tokens=10, **params)
            for pool in (stack.pool, sglang_pool)
        )
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (
                other.token_ids,
                other.text,
                other.finish_reason,
            )
            assert one.weight_versions == other.weight_versions
            torch.testing.assert_close(
                torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0
            )


def test_what_stops_a_sample(served: Served) -> None:
    greedy = {"temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}
    (whole,) = served.sample(max_new_tokens=12, **greedy)
    third = whole.text[2]
    cut = whole.text.index(third)
    (kept,) = served.sample(max_new_tokens=12, stop=[third], **greedy)
    assert (kept.finish_reason, kept.text) == ("stop", whole.text[: cut + 1])
    assert kept.token_ids == whole.token_ids[: cut + 1] and len(kept.log_probs) == cut + 1
    (trimmed,) = served.sample(max_new_tokens=12, stop=[third], no_stop_trim=False, **greedy)
    assert trimmed.text == whole.text[:cut]
    (by_id,) = served.sample(max_new_tokens=12, stop_token_ids=[whole.token_ids[cut]], **greedy)
    assert (by_id.finish_reason, by_id.token_ids) == ("stop", kept.token_ids)
    later = served.sample(
        max_new_tokens=12, min_new_tokens=cut + 2, stop_token_ids=[whole.token_ids[cut]], **greedy
    )
    assert len(later[0].token_ids) > cut + 1
    assert [len(served.sample(max_new_tokens=n, **greedy)[0].token_ids) for n in (1, 5)] == [1, 5]


def test_an_abort_ends_all_with_what_they_have(served: Served) -> None:
    async def run() -> list[GenerateResult]:
        client = served.pool.client()
        task = asyncio.create_task(
            served.sample_async((1, 2, 3), PROMPT, max_new_tokens=490, ignore_eos=True)
        )
        await served.generating()
        await client.abort_all()
        await client.close()
        return await task

    for one in asyncio.run(run()):
        assert one.finish_reason == "abort" and len(one.token_ids) < 490
        close_to_model(one, served.stack.checkpoint, 1.0, atol=1e-3)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_nothing_is_generated_during_a_pause(served: Served, mode: str) -> None:
    async def run() -> tuple[GenerateResult, GenerateResult]:
        running = asyncio.create_task(served.sample_async((1,), PROMPT, max_new_tokens=490, ignore_eos=True))
        await served.generating()
        await asyncio.to_thread(served.control.pause, mode)
        await asyncio.sleep(0.2)  # the engine counts a moment later
        made = served.stack.metric("generation_tokens_total")
        waiting = asyncio.create_task(served.sample_async((2,), PROMPT, max_new_tokens=4))
        await asyncio.sleep(0.4)
        assert served.stack.metric("generation_tokens_total") == made
        assert not waiting.done() and running.done() == (mode == "abort")
        await asyncio.to_thread(served.control.resume)
        return (await running)[0], (await waiting)[0]

    cut, later = asyncio.run(run())
    close_to_model(cut, served.stack.checkpoint, 1.0, atol=1e-3)
    close_to_model(later, served.stack.checkpoint, 1.0)
    if mode == "abort":
        assert cut.finish_reason == "abort" and len(cut.token_ids) < 490
    else:
        assert cut.finish_reason == "length" and len(cut.token_ids) == 490


def test_an_update_changes_weights_and_version(served: Served) -> None:
    before = served.sample(seeds=(6,))[0]
    version = served.publish(served.stack.other)
    assert served.control.weight_version() == version
    after = served.sample(seeds=(6,))[0]
    assert (before.weight_versions, after.weight_versions) == ([version - 1], [version])
    assert after.cached_tokens == 0 and after.log_probs != before.log_probs
    close_to_model(after, served.stack.other, 1.0)
    served.publish(served.stack.checkpoint)
    back = served.sample(seeds=(6,))[0]
    assert (back.token_ids, back.weight_versions) == (before.token_ids, [version + 1])
    close_to_model(back, served.stack.checkpoint, 1.0)


def test_each_token_of_a_sample_during_an_update_names_its_version(served: Served) -> None:
    """The first tokens have log-probs and version of the old weights, the later tokens those of the new weights."""

    async def run() -> tuple[list[GenerateResult], int]:
        running = asyncio.create_task(
            served.sample_async((1, 2), PROMPT, max_new_tokens=490, ignore_eos=True)
        )
        await served.generating()
        version = await asyncio.to_thread(served.publish, served.stack.other)
        return await running, version

    results, version = asyncio.run(run())
    for result in results:
        assert result.weight_versions == [version - 1, version]
        assert (result.finish_reason, len(result.token_ids)) == ("length", 490)
        versions = result.token_columns["token_versions"]
        old_tokens = versions.index(version)
        assert old_tokens > 0 and versions == [version - 1] * old_tokens + [version] * (490 - old_tokens)
        given = torch.tensor(result.log_probs)
        old = hf_log_probs(served.stack.checkpoint, PROMPT, result.token_ids, 1.0)
        new = hf_log_probs(served.stack.other, PROMPT, result.token_ids, 1.0)
        assert (given - old).abs()[:old_tokens].max() < 1e-3
        assert (given - new).abs()[old_tokens:].max() < 1e-3
    served.publish(served.stack.checkpoint)


def test_a_refused_update_changes_nothing(served: Served) -> None:
    stack = served.stack
    before = served.sample(seeds=(6,))[0]
    state = load_file(stack.other / "model.safetensors")
    del state["model.norm.weight"]
    stack.parts = [FileChannel(stack.weight_dir).publish(whole_slices(state.items()), stack.version + 1)]
    with pytest.raises(ControlError, match=r"model\.norm\.weight missing from the file"):
        served.pool.publish(stack.version + 1)
    assert served.control.weight_version() == stack.version
    stack.version += 1
    served.publish(stack.checkpoint)  # the pool is paused until then
    after = served.sample(seeds=(6,))[0]
    assert (after.token_ids, after.log_probs) == (before.token_ids, before.log_probs)


def test_faults_of_a_request(served: Served) -> None:
    with pytest.raises(ValueError, match="sampling parameters must be among"):
        served.sample(temprature=1.0)
    with pytest.raises(ValueError, match="HTTP 400.*context"):
        served.sample(prompt=[5] * 510, max_new_tokens=8)
    with pytest.raises(ValueError, match="the engine must accept the request, got .*out of vocabulary"):
        served.sample(prompt=[10**6])

    async def ask(url: str, key: str) -> None:
        client = served.pool.kind.client(url, key)
        try:
            await client.generate(PROMPT, {"max_new_tokens": 1}, seed=0, deadline_s=0.5)
        finally:
            await client.close()

    with pytest.raises(ValueError, match="HTTP 401"):
        asyncio.run(ask(served.pool.router_url, "wrong"))
    with pytest.raises(
        TimeoutError, match=r"--rollout-deadline-s 0\.5, got no completion of a prompt of 6 tokens"
    ):
        asyncio.run(ask("http://127.0.0.1:9", Stack.key))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(POOLS))
def test_a_killed_engine_comes_back_with_the_last_weights(name: str, tmp_path: Path) -> None:
    """The pool starts the engine itself and uses its backend's protocol."""
    stack = Stack(tmp_path)
    stack.pool.stop()
    spec = stack.pool._members[0].spec
    router = RouterSpec(run_key=Stack.key, log_path=str(tmp_path / "router.log"))
    pool = POOLS[name]([spec], router, spawn=VllmServer, source=stack, health_check_interval_s=2)
    served = Served(stack, pool)
    pool.start()
    try:
        version = served.publish(stack.other)
        handle = pool._members[0].handle
        assert isinstance(handle, VllmServer) and handle._process is not None
        children = psutil.Process(handle._process.pid).children(recursive=True)
        (engine,) = [p for p in children if "EngineCore" in command_line(p)]

        async def run() -> list[GenerateResult]:
            task = asyncio.create_task(
                served.sample_async((1, 2), PROMPT, deadline_s=300, max_new_tokens=300, ignore_eos=True)
            )
            await asyncio.sleep(0.5)
            os.kill(engine.pid, signal.SIGKILL)
            return await task

        began = time.monotonic()
        for one in asyncio.run(run()):
            assert (len(one.token_ids), one.weight_versions) == (300, [version])
            assert math.isfinite(sum(one.log_probs))
            close_to_model(one, stack.other, 1.0, atol=1e-3)
        print(f"{name}: two requests were answered {time.monotonic() - began:.0f} s after the kill")
        pool.check_health()
    finally:
        pool.stop()
