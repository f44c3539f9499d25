"""Whole runs of `vime train` from a quantised checkpoint. The engine keeps its scheme, updates bring the scheme, and
all live values are compared after each update. The runs cover files, broadcasts, deltas, a trainer of two ranks, and
plain weights in --ref-load for a quantised checkpoint, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quantize import main as quantize
from train_fixtures import World, make_world, rows, run, vime

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    for world in make_world(arch="qwen3-moe-blocks-tiny"):
        for scheme in ("fp8", "int4"):
            quantize(["--scheme", scheme, "--experts-only", str(world.model), str(world.root / scheme)])
        quantize(["--scheme", "fp8", str(world.model), str(world.root / "fp8-all")])
        (world.root / "plain").symlink_to(world.model)
        yield world


APART = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
TWO_RANKS = (
    *("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--rollout-num-gpus", "1"),
)
COLOCATED = ("--colocate", "--actor-num-gpus-per-node", "1")
REFERENCE = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "files": ("fp8-all", COLOCATED),
    "plain-reference": ("fp8-all", (*COLOCATED, *REFERENCE, "{root}/plain")),
    "quantized-reference": ("plain", (*COLOCATED, *REFERENCE, "{root}/fp8-all")),
    "deltas": ("fp8", (*APART, "--update-weight-mode", "delta", "--update-weight-transport", "disk")),
    "broadcast": (
        *("int4",),
        (*TWO_RANKS, "--update-weight-transport", "nccl", "--update-weight-buffer-size", "200000"),
    ),
    "deltas-int4": ("int4", (*APART, "--update-weight-mode", "delta", "--update-weight-transport", "nccl")),
}


@pytest.mark.parametrize("name", RUNS)
def test_engines_agree_with_the_trainer(world: World, name: str) -> None:
    """The log-probs of engine and trainer differ by the rounding of activations before the first step. After it, they
    also differ by the rounding of the weights to the scheme."""
    checkpoint, flags = RUNS[name]
    model, world.model = world.model, world.root / checkpoint
    try:
        given = [flag.format(root=world.root) for flag in flags]
        argv = [*world.grpo(name, rollouts=3), *given, "--check-weight-update-equal", "--use-tis"]
    finally:
        world.model = model
    run(vime("train", *argv), world.root / f"{name}.out", timeout_s=480)
    steps = rows(world.root / name, "train/step")
    assert len(steps) == 3
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in steps.values()]
    print(name, differences)
    assert 0 < differences[0] < 0.05 and max(differences) < 0.3
    if "--ref-load" in flags:  # the policy starts from the weights of the reference
        assert abs(steps[0]["train/kl_loss"]) < 1e-6 < steps[2]["train/kl_loss"]
