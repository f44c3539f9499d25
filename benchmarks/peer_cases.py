"""The cases of against_peers.py, and their settings under each side's names.

All sides have the same model, prompts, reward, batch sizes, optimizer settings, precision and recomputation. On a GPU,
all engines may use the same part of the card's memory, and all sides' micro-batches have about the same size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, TRL, TRL_SLEEP, VERL, VERL_DEFAULT = "ours", "trl", "trl-sleep", "verl", "verl-default"
SIDES = (OURS, TRL, TRL_SLEEP, VERL, VERL_DEFAULT)
"""`trl-sleep` is TRL with vllm_enable_sleep_mode. Its engine frees its memory while the trainer works, as our engine
and verl's engine always do. Without this mode, TRL saves the time of sleep and wake-up.

`verl` takes the old log-probs from the engine (rollout_correction.bypass_mode), so that a rollout has one forward and
one backward pass, as on the other sides, and it does not wait at the end of a rollout (verl_sampler.py).
`verl-default` is verl's default: it computes the old log-probs in one more forward pass, and it asks every 2 s whether
all responses have arrived."""
GPU_SIDES = (VERL, VERL_DEFAULT)
"""Sides that need a GPU: verl's trainer has no CPU backend."""
PEERS = {TRL: "trl", TRL_SLEEP: "trl", VERL: "verl", VERL_DEFAULT: "verl"}
"""Side -> its program NAME. `NAME.txt` has the program's packages, and `NAME_side.py` makes a run."""


@dataclass(frozen=True)
class PeerCase:
    """One comparison. `steps` is the number of optimizer steps per rollout, and `max_tokens` the limit of a response.

    `data` is a key of `DATA`. `micro_tokens` is the size of our and verl's packed micro-batches, in tokens.
    `micro_samples` is the size of TRL's padded micro-batches, in samples (None: all samples of an optimizer step).
    `engine_gib` is the GPU memory of the engine, and `flags` are more flags of our side.
    """

    model: str
    data: str
    prompts: int
    answers: int
    max_tokens: int
    steps: int = 1
    lr: float = 2e-4
    device: str = "cpu"
    micro_tokens: int = 4096
    micro_samples: int | None = None
    engine_gib: float = 0.0
    context: int = 0
    recompute: bool = False
    flags: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples per rollout."""
        return self.prompts * self.answers


SMOLLM2, QWEN2, QWEN3 = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen3-4b"
CASES = {
    "short": PeerCase("tiny/warm", "tiny", prompts=64, answers=16, max_tokens=5, steps=4),
    "long": PeerCase("tiny/base", "tiny", prompts=64, answers=16, max_tokens=64, steps=4),
    "wide": PeerCase("wide", "tiny", prompts=8, answers=8, max_tokens=128),
    "smollm2": PeerCase(SMOLLM2, "gsm8k", prompts=8, answers=4, max_tokens=64, lr=1e-6),
    "smollm2-gpu": PeerCase(
        *(SMOLLM2, "gsm8k"),
        **{"prompts": 64, "answers": 8, "max_tokens": 256, "lr": 1e-6, "device": "cuda"},
        **{"micro_tokens": 16384, "micro_samples": 32, "engine_gib": 12.0, "context": 1024},
    ),
    "qwen2.5-0.5b-gpu": PeerCase(
        *(QWEN2, "gsm8k"),
        **{"prompts": 32, "answers": 8, "max_tokens": 512, "lr": 2e-6, "device": "cuda"},
        **{"micro_tokens": 16384, "micro_samples": 16, "engine_gib": 16.0, "context": 1024},
    ),
    # The gradients are zero between two steps, so their GPU memory is freed without a copy. The optimizer has the lower
    # 16 bits of the main weights, and the upper 16 bits are the weights.
    "qwen3-4b-gpu": PeerCase(
        *(QWEN3, "arithmetic"),
        **{"prompts": 16, "answers": 8, "max_tokens": 512, "lr": 1e-6, "device": "cuda"},
        **{
            "micro_tokens": 16896,
            "micro_samples": 32,
            "engine_gib": 24.0,
            "context": 1024,
            "recompute": True,
        },
        flags=(
            *("--offload-train", "--offload-train-parts", "gradients"),
            *("--rl-kernel-workspace-mib", "512", "--use-precision-aware-optimizer"),
        ),
    ),
    # The same on a card of 80 GiB. On our side, the whole trainer is offloaded while the engine generates.
    "qwen3-4b-80gib": PeerCase(
        *(QWEN3, "arithmetic"),
        **{"prompts": 16, "answers": 8, "max_tokens": 512, "lr": 1e-6, "device": "cuda"},
        **{"micro_tokens": 8192, "micro_samples": 4, "engine_gib": 22.0, "context": 1024, "recompute": True},
        flags=("--offload-train", "--rl-kernel-workspace-mib", "512"),
    ),
}
"""The tiny model warmed up, with responses of about 4 tokens; the same model untrained, 57 tokens; 48 M parameters;
SmolLM2-135M; and on a GPU SmolLM2-135M, Qwen2.5-Coder-0.5B and a random Qwen3-4B, on a card of 130 GiB or of 80
GiB."""

DATA = {"tiny": ("prompt", "label"), "arithmetic": ("prompt", "label"), "gsm8k": ("question", "answer")}
"""Prompts of a case -> the columns of prompt and label in the prompt file."""


@dataclass(frozen=True)
class Place:
    """A run's files. `gpu_gib` is the memory of the card, 0 without a card."""

    model: Path
    prompts: Path
    run_dir: Path
    gpu_gib: float = 0.0

    def engine_share(self, case: PeerCase) -> float:
        """Returns the share of the card's memory that the engine may use."""
        return round(case.engine_gib / self.gpu_gib, 4)


def our_command(case: PeerCase, place: Place, rollouts: int, seed: int) -> list[str]:
    """Returns `vime train` with the flags of scripts/run-tiny-grpo.sh, without checkpoints, evaluations and
    shuffling."""
    prompt, label = DATA[case.data]
    return [
        *("--colocate", "--hf-checkpoint", str(place.model), "--prompt-data", str(place.prompts)),
        *("--input-key", prompt, "--label-key", label, "--apply-chat-template", "--rm-type", "gsm8k"),
        *("--num-rollout", str(rollouts), "--rollout-batch-size", str(case.prompts)),
        *(
            "--n-samples-per-prompt",
            str(case.answers),
            "--global-batch-size",
            str(case.samples // case.steps),
        ),
        *("--rollout-max-response-len", str(case.max_tokens), "--rollout-temperature", "1"),
        *("--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.28"),
        *("--lr", str(case.lr), "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--actor-num-gpus-per-node", "1", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", str(case.micro_tokens)),
        *(
            "--balance-data",
            "--seed",
            str(seed),
            "--rollout-seed",
            str(seed),
            "--run-dir",
            str(place.run_dir),
        ),
        *(our_gpu_flags(case, place) if case.device == "cuda" else ("--fp32",)),
    ]


def our_gpu_flags(case: PeerCase, place: Place) -> list[str]:
    """Returns flags for bfloat16 parameters with float32 main weights, gradients and Adam state, and flash
    attention."""
    recompute = [
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    ]
    return [
        *("--device", "cuda", "--num-gpus-per-node", "1", "--bf16", "--accumulate-allreduce-grads-in-fp32"),
        *("--attention-softmax-in-fp32", "--attention-backend", "flash"),
        *("--vllm-gpu-memory-utilization", str(place.engine_share(case))),
        *("--vllm-max-model-len", str(case.context)),
        *(recompute if case.recompute else ()),
        *case.flags,
    ]


def peer_job(case: PeerCase, place: Place, rollouts: int, seed: int, side: str) -> dict[str, Any]:
    """Returns the fields of trl_side.Job or verl_side.Job."""
    prompt, label = DATA[case.data]
    job = {
        **{
            "model": str(place.model),
            "prompts": str(place.prompts),
            "prompt_key": prompt,
            "label_key": label,
        },
        **{"out": str(place.run_dir / "result.json"), "run_dir": str(place.run_dir)},
        **{"rollouts": rollouts, "seed": seed, "prompts_per_rollout": case.prompts},
        **{"answers": case.answers, "max_tokens": case.max_tokens, "steps": case.steps, "lr": case.lr},
        **{"recompute": case.recompute, "context": case.context},
        "engine_share": place.engine_share(case) if case.device == "cuda" else 0.0,
    }
    if PEERS[side] == "verl":
        return {**job, "micro_tokens": case.micro_tokens, "tuned": side == VERL}
    micro_samples = case.micro_samples or case.samples // case.steps
    return {**job, "device": case.device, "micro_samples": micro_samples, "sleep": side == TRL_SLEEP}
