"""Tests the rollout benchmark on a real engine, at a tiny size: every contender gets its number of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from rollout_speed import main
from train_fixtures import World, make_world

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield from make_world()


def test_rollout_and_raw_vllm_make_the_same_tokens(world: World) -> None:
    out = world.root / "speed.json"
    sizes = ["--requests", "8", "--group", "4", "--prompt-tokens", "16", "--response-tokens", "16"]
    argv = ["--model", str(world.model), "--device", "cpu", *sizes, "--rounds", "1", "--out", str(out)]
    assert main(argv) == 0  # asserts the tokens of every turn
    found = json.loads(out.read_text())
    assert found["engine"] == "vllm" and found["machine"]["vllm"] != "0"
    assert 0 < found["ours_to"]["raw"] < 3
    assert len(found["turns"]) == 4 and all(len(turns) == 1 for turns in found["turns"].values())
