"""Whole runs of `vime train` whose engine drafts with MiMo's layer of multi-token prediction."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
from family_cases import ENGINE_SHAPE
from family_engine import with_remote_config
from megatron_cases import tiny_checkpoint
from train_fixtures import World, make_world, rows, run, samples, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DRAFT = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A tiny MiMo with the tokenizer of the tiny Qwen3."""
    for world in make_world():
        tokenizer = json.loads((world.model / "config.json").read_text())
        shape = {key: tokenizer[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
        mimo = world.root / "mimo"
        tiny_checkpoint(mimo, "mimo", **ENGINE_SHAPE, **shape, tie_word_embeddings=False)
        with_remote_config(mimo, "mimo")
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(world.model / file, mimo)
        world.model = mimo
        yield world


def test_three_steps_with_a_draft(world: World) -> None:
    """Trainer and engine agree with a draft as without. After each update, every tensor of the engine is compared with
    the trainer's, those of the draft included."""
    flags = world.grpo("draft", rollouts=3)
    at = flags.index("--rollout-max-response-len")
    flags[at + 1] = "24"
    placement = ["--colocate", "--actor-num-gpus-per-node", "1", "--check-weight-update-equal"]
    draft = ["--vllm-speculative-config", json.dumps(DRAFT), "--enable-mtp-training", "--trust-remote-code"]
    run(vime("train", *flags, *placement, *draft), world.root / "out")
    steps, rollouts = rows(world.root / "draft", "train/step"), rows(world.root / "draft", "rollout/step")
    assert len(steps) == len(rollouts) == 3
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["train/mtp_loss"] > 0 and row["train/grad_norm"] > 0
    found = 0
    for number, row in rollouts.items():
        infos = [sample["spec_info"] for sample in samples(world.root / "draft", number)]
        accepted, drafted, passes, tokens = (
            sum(info[key] for info in infos)
            for key in (
                *("spec_accept_token_num", "spec_draft_token_num"),
                *("spec_verify_ct", "completion_token_num"),
            )
        )
        assert 0 <= accepted < drafted
        found += accepted
        assert row["rollout/spec_accept_rate"] == pytest.approx(accepted / drafted)
        assert row["rollout/spec_accept_length"] == pytest.approx(tokens / passes)
    assert found > 0  # a random draft is right once in 250 times, and there are over 2000
