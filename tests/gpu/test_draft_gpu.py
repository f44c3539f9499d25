"""A run on one GPU whose engine drafts with a layer of multi-token prediction that the run trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from draft_cases import mimo_world, train_with_a_draft
from train_fixtures import World

pytestmark = pytest.mark.gpu

ENGINE = (
    *("--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
    *("--vllm-max-model-len", "512", "--vllm-enforce-eager"),
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from mimo_world("cuda")


def test_three_steps_with_a_draft(world: World) -> None:
    """vLLM 0.26 does not count drafted tokens per request, so their number is not looked at."""
    train_with_a_draft(world, 0.02, *ENGINE)
