"""A real engine reports each token's experts: with the prefix cache, an update, an abort, and in parts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fixtures import Stack, hf_model, make_experts

from slime.protocols import EXPERTS as COLUMN
from slime.protocols import GenerateResult
from vime.pool.router import RouterSpec
from vime.vllm.pool import VllmEnginePool
from vime.vllm.server import VllmSpec

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LAYERS, TOPK = 2, 2
PROMPT = [4 + i * 7 % 40 for i in range(40)]


class RoutedStack(Stack):
    def __init__(self, root: Path) -> None:
        self.weight_dir = root / "weights"
        self.checkpoint = make_experts(root / "first", 0)
        self.other = make_experts(root / "second", 1)
        spec = VllmSpec(
            model_path=str(self.checkpoint),
            run_key=self.key,
            log_path=str(root / "engine.log"),
            weight_dir=str(self.weight_dir),
            start_timeout_s=240,
            reports_experts=True,
        )
        router = RouterSpec(run_key=self.key, log_path=str(root / "router.log"))
        self.pool = VllmEnginePool([spec], router, source=self, health_check_interval_s=5)
        self.parts = []
        self.version = -1

    def routed(self, prompts: list[list[int]], *, start: int | None = 0, **params: object) -> list:
        async def run() -> list[GenerateResult]:
            client = self.pool.client()
            sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, **params}
            asked = {} if start is None else {"columns": {COLUMN: start}}
            try:
                return await asyncio.gather(
                    *(
                        client.generate(p, sampling, seed=i, deadline_s=60, **asked)
                        for i, p in enumerate(prompts)
                    )
                )
            finally:
                await client.close()

        return asyncio.run(run())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoutedStack]:
    made = RoutedStack(tmp_path_factory.mktemp("routed"))
    made.pool.start()
    yield made
    made.pool.stop()


def of_transformers(checkpoint: Path, tokens: list[int]) -> np.ndarray:
    """Returns transformers' choice of experts, [N - 1, L, K], each token's experts in rising order."""
    with torch.no_grad():
        logits = hf_model(checkpoint)(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(TOPK, dim=-1).indices for layer in logits], 1)
    return chosen.sort(-1).values[:-1].numpy()


def in_order(result: GenerateResult) -> np.ndarray:
    return np.sort(result.columns[COLUMN][0], axis=-1)


def test_every_token_but_the_last_has_its_experts_also_from_the_cache(stack: RoutedStack) -> None:
    prompts = [PROMPT, PROMPT[:9], PROMPT[5:] * 4]
    first = stack.routed(prompts)
    again = stack.routed(prompts)
    assert again[2].cached_tokens >= 128 and first[2].cached_tokens == 0
    for prompt, result, repeated in zip(prompts, first, again, strict=True):
        rows = in_order(result)
        assert result.columns[COLUMN][0].dtype == np.uint8
        assert rows.shape == (len(prompt) + 24 - 1, LAYERS, TOPK)
        expected = of_transformers(stack.checkpoint, prompt + result.token_ids)
        np.testing.assert_array_equal(rows, expected)
        assert len({tuple(row) for row in rows.reshape(-1, TOPK)}) > 5
        assert repeated.token_ids == result.token_ids
        np.testing.assert_array_equal(in_order(repeated), rows)


def test_a_request_says_from_where_on(stack: RoutedStack) -> None:
    (whole,) = stack.routed([PROMPT])
    so_far = PROMPT + whole.token_ids[:10]
    (rest,) = stack.routed([so_far], start=len(so_far) - 1, max_new_tokens=5)
    assert len(rest.columns[COLUMN][0]) == 5  # the last token so far, and four of the five new tokens
    tokens = so_far + rest.token_ids
    np.testing.assert_array_equal(
        in_order(rest), of_transformers(stack.checkpoint, tokens)[len(so_far) - 1 :]
    )
    assert COLUMN not in stack.routed([PROMPT], start=None)[0].columns


def test_abort_leaves_the_experts_of_what_there_is(stack: RoutedStack) -> None:
    async def run() -> list[GenerateResult]:
        client = stack.pool.client()
        sampling = {"temperature": 1.0, "max_new_tokens": 460, "ignore_eos": True}
        tasks = [
            asyncio.create_task(client.generate(PROMPT, sampling, seed=i, deadline_s=60, columns={COLUMN: 0}))
            for i in range(4)
        ]
        await asyncio.sleep(0.3)
        await client.abort_all()
        results = await asyncio.gather(*tasks)
        await client.close()
        return results

    for result in asyncio.run(run()):
        assert result.finish_reason == "abort" and 0 < len(result.token_ids) < 460
        expected = of_transformers(stack.checkpoint, PROMPT + result.token_ids)
        np.testing.assert_array_equal(in_order(result), expected)


def test_an_update_during_a_request_leaves_no_gap(stack: RoutedStack) -> None:
    """Tokens that were computed before the update keep the experts of the old weights, although the engine computes
    their keys and values again. Later tokens have the experts of the new weights."""
    found: list[GenerateResult] = []
    thread = threading.Thread(target=lambda: found.extend(stack.routed([PROMPT], max_new_tokens=460)))
    thread.start()
    time.sleep(0.3)
    stack.push(stack.other, checksums=False)
    thread.join()
    (result,) = found
    assert result.weight_versions == [-1, 0]
    tokens = PROMPT + result.token_ids
    rows = in_order(result)
    assert len(rows) == len(tokens) - 1
    old, new = (
        (rows == of_transformers(path, tokens)).all((1, 2)) for path in (stack.checkpoint, stack.other)
    )
    switch = int(old.argmin())
    assert len(PROMPT) < switch < len(rows) and not new[:switch].all()
    assert new[switch:].all()
