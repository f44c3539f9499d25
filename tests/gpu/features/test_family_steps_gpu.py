"""Tests whole runs of tiny models on one GPU, in bfloat16: three GRPO steps per family, and runs on pairs.

On CPUs, tests/e2e/runs/test_train_families.py and test_train_like.py run two steps of most models, in float32 except
for gated delta nets, and tests/e2e/examples/test_train_dpo.py runs the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from architectures import ARCHITECTURES
from family_engine import with_remote_config
from train_fixtures import ROOT, World, make_world, rows, run, vime

from vime.vllm.versions import installed, missing_architecture

pytestmark = pytest.mark.gpu

FAMILIES = (
    *("llama", "mistral", "glm4", "glm-moe", "mimo", "olmo3", "minimax-m2", "qwen2-moe"),
    *("qwen3-next", "qwen3-5", "gemma2", "gemma3", "gpt-oss", "nemotron-h", "seed-oss"),
)
"""Rows of scripts/architectures.py without "-tiny". vime has no file for the family of the last one. The heads of
DeepSeek's and GLM-5's tiny models are too small for vLLM's kernels on GPUs."""
ENGINE = (
    *("--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
    *("--vllm-max-model-len", "512", "--vllm-enforce-eager"),
)
STEPS = 3
TOLERANCE = 0.02
"""Largest mean difference of log-probs in a step, in nats."""


def served(family: str) -> ParameterSet:
    """Returns a case, which is skipped if the installed vLLM has no class of this model."""
    lacks = missing_architecture(ARCHITECTURES[f"{family}-tiny"].family)
    return pytest.param(
        family, marks=[pytest.mark.skip(f"vLLM {installed()} has no {lacks}")] if lacks else []
    )


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[World]:
    for world in make_world("cuda", f"{request.param}-tiny", "bfloat16"):
        if request.param == "mimo":
            with_remote_config(world.model, "mimo")
        yield world


@pytest.mark.parametrize("family", [served(name) for name in FAMILIES], indirect=True)
def test_three_steps(family: World) -> None:
    """After each update, every tensor of the engine is compared with the trainer's."""
    flags = [*family.grpo("run", rollouts=STEPS), "--colocate", "--actor-num-gpus-per-node", "1"]
    flags += ["--check-weight-update-equal", "--trust-remote-code", *ENGINE]
    run(vime("train", *flags), family.root / "out", timeout_s=400)
    steps = rows(family.root / "run", "train/step")
    assert sorted(steps) == list(range(STEPS))
    for step, row in steps.items():
        assert row["train/train_rollout_logprob_abs_diff"] < TOLERANCE, (step, row)
        assert row["train/grad_norm"] > 0


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_pairs_and_their_held_out_losses(kind: str) -> None:
    """The example's policy, and a reward model, learn which answer is preferred, also in pairs that are not trained
    on."""
    for world in make_world("cuda"):
        pairs = [str(world.root / f"{part}-pairs.jsonl") for part in ("train", "test")]
        for part, file in zip(("train", "test"), pairs, strict=True):
            made = [str(ROOT / "examples/dpo/pairs.py"), str(world.data / f"{part}.jsonl"), file]
            run([vime()[0], *made], world.root / "pairs.out")
        command = vime(
            *("train", "--config", str(ROOT / "examples/dpo/dpo.yaml"), "--device", world.device),
            *("--hf-checkpoint", str(world.model), "--prompt-data", pairs[0], "--loss-type", kind),
            *("--run-dir", str(world.root / "run"), "--eval-prompt-data", "held-out", pairs[1]),
            *("--eval-interval", "10", "--num-rollout", "20"),
        )
        run(command, world.root / "out")
        found = rows(world.root / "run", "eval/step")
        losses = [found[step]["eval/held-out/loss"] for step in (0, 10, 20)]
        assert losses[0] == pytest.approx(0.693, abs=0.02) and losses[0] > 2 * losses[1] > 2 * losses[2]
        assert found[20]["eval/held-out/rewards/accuracies"] > 0.95
