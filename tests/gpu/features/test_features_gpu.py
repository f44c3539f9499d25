"""Tests whole runs on one GPU, each with one feature. Tests of the same features on CPUs use float32 and no kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from quantize import quantization_config, quantize_checkpoint
from train_fixtures import PROMPTS, SAMPLES, World, make_world, rows, run, samples, vime

import vime as api
from slime.tracking.ledger import read_ledger
from slime.types import Sample

pytestmark = pytest.mark.gpu

ROLLOUTS = 3
ENGINE = (
    *("--vllm-gpu-memory-utilization", "0.1", "--vllm-kv-cache-memory-bytes", str(1 << 30)),
    *("--vllm-max-model-len", "512", "--vllm-enforce-eager"),
)
DENSE, EXPERTS = "qwen3-50m", "qwen3-moe-tiny"
ABS_DIFF = "train/train_rollout_logprob_abs_diff"
TOLERANCE, ROUNDING = 0.02, 0.3
"""Largest mean differences in nats: in bfloat16, and with an engine that rounds activations to fp8."""


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    yield from make_world("cuda", getattr(request, "param", DENSE))


def train(world: World, *flags: str, rollouts: int = ROLLOUTS, name: str = "run") -> str:
    """Trains with flags, which may replace those of World.grpo, and returns the output."""
    argv = [
        *world.grpo(name, rollouts=rollouts),
        "--colocate",
        "--actor-num-gpus-per-node",
        "1",
        *ENGINE,
        *flags,
    ]
    return run(vime("train", *argv), world.root / f"{name}.out", timeout_s=400)


def check(world: World, *, tolerance: float = TOLERANCE, name: str = "run") -> dict[int, dict[str, float]]:
    """Checks that the run has trained, and that its engine had the trainer's weights. Returns its optimizer steps."""
    steps = rows(world.root / name, "train/step")
    assert sorted(steps) == list(range(ROLLOUTS))
    for step, row in steps.items():
        assert row["train/grad_norm"] > 0 and row[ABS_DIFF] < tolerance, (step, row)
    return steps


def test_muon_trains_and_resumes(world: World) -> None:
    flags = ("--optimizer", "muon", "--check-weight-update-equal")
    flags += ("--save", str(world.root / "saved"), "--load", str(world.root / "saved"))
    train(world, *flags, rollouts=ROLLOUTS - 1)
    out = train(world, *flags)
    check(world)
    assert f"resumes after rollout {ROLLOUTS - 2}" in out and read_ledger(world.root / "run").starts == 2


def test_adam_in_files(world: World) -> None:
    """The run removes the files of Adam's state at its end."""
    state = world.root / "state"
    flags = ("--stream-optimizer-state-to-disk", "--offload-train-disk-dir", str(state))
    train(world, *flags, "--check-weight-update-equal")
    check(world)
    assert state.is_dir() and not list(state.iterdir())


def test_inputs_of_layers_on_the_host(world: World) -> None:
    """With the same samples, the steps are those of a run whose inputs stay on the GPU."""
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    train(world, *full, "--cpu-offloading", "--check-weight-update-equal")
    away = check(world)
    data = str(world.root / "run" / "samples" / "{rollout_id}.pt")
    train(world, *full, "--load-debug-rollout-data", data, "--debug-train-only", name="stays")
    stays = check(world, name="stays")
    for step, row in away.items():
        assert row["train/grad_norm"] == pytest.approx(stays[step]["train/grad_norm"], rel=1e-3)


def test_a_provider_of_log_probs(world: World) -> None:
    """The provider gets logits and the hidden states with the LM head's weight."""
    provider = "rl_kernel.integrations.vime.linear_logp.provider"
    train(world, "--selected-logprob-provider", provider, "--selected-logprob-provider-mode", "strict")
    check(world)


def test_cudnn_attention(world: World) -> None:
    """Sequences have 124 tokens, because cuDNN's attention pads them to a multiple of 128. The trainer warns once about
    micro-batches that have another attention, for instance if they have much padding."""
    flags = (
        "--attention-backend",
        "fused",
        "--custom-generate-function-path",
        "train_fixtures.full_generate",
    )
    lengths = ("--rollout-max-response-len", "110", "--max-tokens-per-gpu", "512")
    out = train(world, *flags, *lengths, "--check-weight-update-equal")
    check(world)
    for saved in samples(world.root / "run", ROLLOUTS - 1):
        assert len(saved["tokens"]) == 124
    log = (world.root / "run" / "logs" / "trainer-0.log").read_text()
    assert "fused has no effect" not in out + log


def test_scores_are_centred_on_the_likeliest_ids(world: World) -> None:
    """The rows of ids and log-probs come from the engine."""
    train(world, "--use-score-centering", "--score-centering-top-k", "32")
    check(world)
    for saved in samples(world.root / "run", ROLLOUTS - 1):
        assert np.shape(Sample.from_dict(saved).rollout_topk_log_probs) == (saved["response_length"], 32)


def test_log_probs_over_kept_ids(world: World) -> None:
    """The trainer normalises over the ids from which the engine sampled a token. Equal probabilities over the whole
    vocabulary would differ by log(256 / 20) = 2.5 nats."""
    train(world, "--rollout-top-k", "20", "--replay-kept-tokens", "20")
    check(world)
    for row in rows(world.root / "run", "rollout/step").values():
        assert row["rollout/top_p_not_kept_frac"] == 0


@pytest.mark.parametrize("world", [EXPERTS], indirect=True)
def test_the_trainer_uses_the_engines_experts(world: World) -> None:
    train(world, "--use-rollout-routing-replay", "--check-weight-update-equal")
    for row in check(world).values():
        assert 0 <= row["train/routed_experts_differ"] < 0.1
    for saved in samples(world.root / "run", ROLLOUTS - 1):
        sample = Sample.from_dict(saved)
        assert sample.rollout_routed_experts.shape[0] == len(sample.tokens) - 1


def test_small_updates_of_fp8_weights_reach_the_engine(world: World) -> None:
    """The engine compares all of its weights with the trainer's after each update with a small learning rate."""
    source = world.root / "fp8"
    quantize_checkpoint(world.model, source, quantization_config("fp8"))
    flags = ("--hf-checkpoint", str(source), "--dither-weights", "--use-tis", "--lr", "1e-5")
    out = train(world, *flags, "--check-weight-update-equal")
    assert "the engines keep the weights of --hf-checkpoint in" in out
    check(world, tolerance=ROUNDING)


def test_held_out_losses_of_fine_tuning(world: World) -> None:
    held_out = (
        "--eval-interval",
        "4",
        "--eval-prompt-data",
        "held-out",
        f"{world.data / 'sft.jsonl'}@[7000:]",
    )
    run(vime("train", *world.sft("sft", rollouts=8), *held_out, "--lr", "1e-3"), world.root / "sft.out")
    losses = [row["eval/held-out/loss"] for _, row in sorted(rows(world.root / "sft", "eval/step").items())]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]


def odd(args: object, sample: Sample) -> float:
    return float(sample.tokens[-1] % 2)


def test_the_python_api(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a function of this module as its reward is stopped and resumed."""
    monkeypatch.chdir(world.root)
    engine = dict(zip((word[2:].replace("-", "_") for word in ENGINE[:-1:2]), ENGINE[1::2], strict=True))
    flags = {
        **{"hf_checkpoint": world.model, "prompt_data": world.data / "train.jsonl", "input_key": "prompt"},
        **{"label_key": "label", "apply_chat_template": True, "device": "cuda", "colocate": True},
        **{"actor_num_gpus_per_node": 1, "rollout_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES},
        **{"rollout_max_response_len": 4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 1024},
        **{"num_rollout": 400, "save": "ckpt", "load": "ckpt", "run_dir": "run", "vllm_enforce_eager": True},
        **engine,
    }
    first = api.train(flags, reward=odd, wait=False)
    while first.state == "running" and len(first.metrics) < 2:
        time.sleep(0.1)
    first.stop()
    assert first.wait(120).state == "interrupted"
    done = len(first.metrics)
    second = api.train({**flags, "num_rollout": done + 1}, reward=odd)
    assert [row["rollout"] for row in second.metrics] == list(range(done + 1))
