"""Makes a tiny MiMo whose engine drafts with the model's layer of multi-token prediction, and trains it in a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from family_cases import ENGINE_SHAPE
from family_engine import with_remote_config
from megatron_cases import tiny_checkpoint
from train_fixtures import World, make_world, rows, run, vime

DRAFT = {"method": "mtp", "num_speculative_tokens": 1}
STEPS = 3


def mimo_world(device: str = "cpu") -> Iterator[World]:
    """Yields a world whose model is a tiny MiMo with the default model's tokenizer (for a module's fixture)."""
    for world in make_world(device):
        said = json.loads((world.model / "config.json").read_text())
        shape = {key: said[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
        mimo = world.root / "mimo"
        tiny_checkpoint(mimo, "mimo", **ENGINE_SHAPE, **shape, tie_word_embeddings=False)
        with_remote_config(mimo, "mimo")
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(world.model / file, mimo)
        world.model = mimo
        yield world


def train_with_a_draft(world: World, tolerance: float, *more: str) -> Path:
    """Runs STEPS steps with a draft and returns the run's directory. Log-probs of trainer and engine must agree, as
    without a draft. After each update, every tensor of the engine, draft included, is compared with the trainer's."""
    flags = world.grpo("draft", rollouts=STEPS)
    at = flags.index("--rollout-max-response-len")
    flags[at + 1] = "24"
    placement = ["--colocate", "--actor-num-gpus-per-node", "1", "--check-weight-update-equal"]
    draft = ["--vllm-speculative-config", json.dumps(DRAFT), "--enable-mtp-training", "--trust-remote-code"]
    run(vime("train", *flags, *placement, *draft, *more), world.root / "out")
    steps = rows(world.root / "draft", "train/step")
    assert len(steps) == len(rows(world.root / "draft", "rollout/step")) == STEPS
    for row in steps.values():
        assert row["train/train_rollout_logprob_abs_diff"] < tolerance
        assert row["train/mtp_loss"] > 0 and row["train/grad_norm"] > 0
    return world.root / "draft"
