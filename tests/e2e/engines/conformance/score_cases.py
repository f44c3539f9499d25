"""Every backend returns log-probs of given tokens. The tests compare them with its own samples and with transformers.

test_backend_conformance.py runs these tests on its engine, which still serves after them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_fixtures import Stack, hf_log_probs, hf_model

from slime.protocols import ScoreResult

PROMPT = [14, 5, 8, 13, 21, 30]


def score(served: Any, tokens: list[int], **options: Any) -> ScoreResult:
    async def run() -> ScoreResult:
        client = served.pool.client()
        try:
            return await client.score(tokens, **{"start": len(PROMPT), "deadline_s": 60, **options})
        finally:
            await client.close()

    return asyncio.run(run())


def test_scores_of_given_tokens(served: Any) -> None:
    """The scores are the model's log-probs at temperature 1, whatever temperature the sample was drawn at."""
    (drawn,) = served.sample(seeds=(3,), max_new_tokens=20, ignore_eos=True)
    (other,) = served.sample(seeds=(4,), max_new_tokens=20, ignore_eos=True, temperature=0.6)
    for one in (drawn, other):
        tokens = PROMPT + one.token_ids
        found = score(served, tokens, top_k=5)
        expected = hf_log_probs(served.stack.checkpoint, PROMPT, one.token_ids, 1.0)
        torch.testing.assert_close(torch.from_numpy(found.log_probs.copy()), expected, atol=1e-5, rtol=0)
        assert found.weight_versions == [served.stack.version]
        with torch.no_grad():
            logits = hf_model(served.stack.checkpoint)(torch.tensor([tokens])).logits[0]
        best = logits[len(PROMPT) - 1 : -1].log_softmax(-1).topk(5)
        ids, values = map(torch.from_numpy, (a.copy() for a in found.top))
        assert (ids.dtype, ids.tolist()) == (torch.int32, best.indices.tolist())
        torch.testing.assert_close(values, best.values, atol=1e-5, rtol=0)
    plain = score(served, PROMPT + drawn.token_ids)
    torch.testing.assert_close(
        torch.from_numpy(plain.log_probs.copy()), torch.tensor(drawn.log_probs), atol=1e-5, rtol=0
    )
    whole = score(served, PROMPT + drawn.token_ids, start=1)
    assert plain.top is None and len(whole.log_probs) == len(PROMPT) + 19
    assert whole.log_probs[-20:].tolist() == pytest.approx(plain.log_probs.tolist(), abs=1e-5)


def test_faults_of_a_score(served: Any) -> None:
    for start in (0, len(PROMPT)):
        with pytest.raises(ValueError, match=rf"start must lie in \[1, 6\), got {start} for 6 tokens"):
            score(served, PROMPT, start=start)
    with pytest.raises(ValueError, match="got .*(65|66).*64|may serve fewer than 65 tokens"):
        score(served, PROMPT, start=2, top_k=65)
    with pytest.raises(ValueError, match="the engine must accept the request, got .*out of vocabulary"):
        score(served, [*PROMPT, 10**6], start=2)
    with pytest.raises(ValueError, match="HTTP 400.*context"):
        score(served, [5] * 512, start=2)

    async def ask(url: str, key: str) -> None:
        client = served.pool.kind.client(url, key)
        try:
            await client.score(PROMPT, start=1, deadline_s=0.5)
        finally:
            await client.close()

    with pytest.raises(ValueError, match="HTTP 401"):
        asyncio.run(ask(served.pool.router_url, "wrong"))
    with pytest.raises(TimeoutError, match=r"--rollout-deadline-s 0\.5, got no"):
        asyncio.run(ask("http://127.0.0.1:9", Stack.key))
