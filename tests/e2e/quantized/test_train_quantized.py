"""Tests whole runs of `vime train` from a quantised checkpoint: train, compare the engine's weights, save in both
forms, resume, and export in both forms. transformers reads the exported files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_engine import offline_engine
from quantize import quantization_config, quantize_checkpoint
from safetensors.torch import load_file
from train_fixtures import World, make_world, rows, run, samples, vime
from transformers import AutoConfig, AutoModelForCausalLM

from slime.checkpoints.hf_files import Files
from slime.models.quantized.quantized_checkpoint import dequantized

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The heads are wider than those of the tiny model, because vLLM needs whole blocks of 128 rows in keys and
    values."""
    for made in make_world():
        config = AutoConfig.from_pretrained(made.model, head_dim=64)
        wide = made.root / "wide"
        shutil.copytree(made.model, wide, ignore=shutil.ignore_patterns("*.safetensors"))
        AutoModelForCausalLM.from_config(config).save_pretrained(wide)
        made.model = wide
        yield made


def read_plain(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a directory in float32, dequantised if they are quantised."""
    tensors = dequantized(Files(folder), json.loads((folder / "config.json").read_text()))
    return {name: tensors.get(name)[...].float() for name in tensors.names()}


def largest_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of two values, relative to the largest value of their weight."""
    assert found.keys() == wanted.keys()
    return max(
        ((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted
    )


SAME_ENGINE = 0.02
"""Largest mean difference of two engines with the same weights, in nats. One computes a response token by token, and
the other in one pass, both in bfloat16."""


def mean_gap(checkpoint: Path, sampled: list[dict[str, Any]], patch: pytest.MonkeyPatch) -> float:
    """Returns the mean difference of log-probs of responses between the engine that sampled them and a new engine with
    the files of `checkpoint`."""
    gaps = []
    with offline_engine(checkpoint, checkpoint / "weights", patch, dtype="bfloat16") as engine:
        for sample in sampled:
            theirs = torch.tensor(sample["rollout_log_probs"])
            gaps.append((engine.log_probs(list(sample["tokens"]))[-len(theirs) :] - theirs).abs())
    return torch.cat(gaps).mean().item()


@pytest.mark.parametrize(
    ("scheme", "rounding", "gap", "more"),
    [
        ("fp8", 2**-4, 0.2, []),
        ("int4", 0.1, 0.5, []),
        ("int4", 1 / 7, SAME_ENGINE, ["--round-weights", "--dither-weights"]),
    ],
    ids=["fp8", "int4", "int4-rounded"],
)
def test_train_resume_and_export(
    world: World, monkeypatch: pytest.MonkeyPatch, scheme: str, rounding: float, gap: float, more: list[str]
) -> None:
    """The directory of the first rollout has the weights with which the engine of the run samples the second. With
    --round-weights, trainer and engine compute with the same weights, also if they are dithered."""
    source = world.root / scheme
    if not source.exists():
        quantize_checkpoint(world.model, source, quantization_config(scheme))
    scheme += "-rounded" * bool(more)
    folder = world.root / f"run-{scheme}"
    flags = [*world.grpo(folder.name, rollouts=1), "--colocate", "--actor-num-gpus-per-node", "1"]
    flags[flags.index("--hf-checkpoint") + 1] = str(source)
    flags += [*more, "--check-weight-update-equal", "--use-tis", "--vllm-dtype", "bfloat16"]
    flags += ["--save", str(folder / "saved"), "--load", str(folder / "saved"), "--save-interval", "1"]
    flags += ["--save-hf", str(folder / "hf-{rollout_id}"), "--save-hf-format", "checkpoint"]
    log = run(vime("train", *flags), world.root / f"out-{scheme}")
    assert "the engines keep the weights of --hf-checkpoint in" in log
    flags[flags.index("--num-rollout") + 1] = "2"
    run(vime("train", *flags), world.root / f"out-{scheme}-resumed")
    steps = rows(folder, "train/step")
    assert sorted(steps) == [0, 1]
    for row in steps.values():
        assert 1e-5 < row["train/train_rollout_logprob_abs_diff"] < gap

    sampled = samples(folder, 1)[:8]
    gaps = [mean_gap(path, sampled, monkeypatch) for path in (folder / "hf-0", source)]
    print(scheme, gaps)
    assert gaps[0] < SAME_ENGINE < gaps[1]

    exported = {}
    for form in ("bf16", "checkpoint"):
        exported[form] = world.root / f"{scheme}-{form}"
        argv = (
            "--load",
            str(folder / "saved"),
            "--hf-checkpoint",
            str(source),
            "--output-dir",
            str(exported[form]),
        )
        run(vime("export", *argv, "--format", form), world.root / f"out-export-{scheme}-{form}")
    plain, stored = read_plain(exported["bf16"]), read_plain(exported["checkpoint"])
    trained = largest_error(plain, read_plain(source))
    assert largest_error(stored, plain) < rounding
    assert trained > 0.001
    saved = load_file(folder / "hf-1" / "model.safetensors")
    written = load_file(exported["checkpoint"] / "model.safetensors")
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name].view(torch.uint8), written[name].view(torch.uint8)) for name in saved)
    described = [json.loads((path / "config.json").read_text()) for path in (source, exported["checkpoint"])]
    assert described[0] == described[1]
    model = AutoModelForCausalLM.from_pretrained(exported["bf16"])
    assert model.dtype == torch.bfloat16
    theirs = {name: tensor.float() for name, tensor in model.state_dict().items() if name in plain}
    assert len(theirs) > 10
    assert all(torch.equal(tensor, plain[name]) for name, tensor in theirs.items())
