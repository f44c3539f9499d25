"""Tests a trainer with adapters: the weights that change, the reference, and resuming."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from megatron_cases import packed_logits, sequences
from safetensors.torch import load_file
from trainer_cases import exported, make_checkpoints, make_config, make_samples, rank_data

from slime.megatron_backend.checkpoint.merged import merged
from slime.megatron_backend.checkpoint.peft import export_adapters
from slime.megatron_backend.checkpoint.weights import export_hf, live
from slime.megatron_backend.parallel import destroy_parallel
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.protocols import CHECKPOINT
from slime.roles import REFERENCE
from vime.commands.export import main as export

LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    make_checkpoints(root)
    return root


@pytest.fixture(autouse=True)
def _alone():
    """Removes the process groups that a trainer leaves when it raises an error."""
    yield
    if torch.distributed.is_initialized():
        destroy_parallel()


def make(root: Path, tmp_path: Path, name: str = "a", **flags: Any) -> MegatronTrainer:
    given = {"weight_dir": str(tmp_path / "weights"), "ref_load": str(root / "policy")}
    return MegatronTrainer(
        make_config(root, **(given | LORA | flags)), 0, 1, init_method=f"file://{tmp_path}/{name}"
    )


def step(trainer: MegatronTrainer, rollout_id: int = 0) -> list[dict[str, float]]:
    return trainer.train(rollout_id, rank_data(trainer.config, make_samples(rollout_id))).steps


def adapters(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in export_adapters(trainer.policy.model)}


def test_adapters_move_and_the_base_does_not(root, tmp_path):
    """Only the adapters have gradients and moments and count in the gradient norm."""
    trainer = make(root, tmp_path)
    before, first = exported(trainer), adapters(trainer)
    assert all(bool(tensor.any()) == ("lora_A" in name) for name, tensor in first.items())
    (metrics,) = step(trainer)
    assert metrics["train/grad_norm"] > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in exported(trainer).items())
    assert all(not torch.equal(first[n], t) for n, t in adapters(trainer).items() if "lora_B" in n)
    parameters = trainer.policy.model.module.named_parameters()
    assert {name.split(".")[0] for name, p in parameters if p.requires_grad} == {"adapters"}
    weights = dict(export_hf(trainer.policy.model, merged(trainer.policy.model, live)))
    moved = {name for name in before if not torch.equal(before[name], weights[name])}
    assert moved == {name for name in before if "_proj." in name}
    published = trainer.next_weights(1, {})  # without an engine, only the adapters
    assert (published.weights.kind, published.weights.base_version) == ("adapter", CHECKPOINT)
    sent = load_file(published.info["path"])
    assert sent.keys() == first.keys()
    assert trainer.next_weights(1, {}) is None
    trainer.close()
    whole = make(root, tmp_path, "b", lora_merge=True)
    step(whole)
    published = whole.next_weights(1, {})
    assert published.weights.kind == "full"
    found = load_file(published.info["path"])
    assert found.keys() == weights.keys() and all(torch.equal(found[n], weights[n]) for n in found)
    whole.close()


def test_the_reference_is_the_model_without_adapters(root, tmp_path):
    """Memory has one model, which also gives the log-probs of the reference."""
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    trainer = make(root, tmp_path, **kl)
    assert trainer.models[REFERENCE.name] is trainer.policy.model
    step(trainer)
    (shared,) = step(trainer, 1)
    trainer.close()
    moved = tmp_path / "copied"
    moved.mkdir()
    for file in (root / "policy").iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    apart = make(root, tmp_path, "b", ref_load=str(moved), **kl)
    assert apart.models[REFERENCE.name] is not apart.policy.model
    step(apart)
    (own,) = step(apart, 1)
    apart.close()
    assert own == shared
    assert shared["train/kl_loss"] != 0


@pytest.mark.slow
def test_a_run_resumes_with_its_adapters(root, tmp_path):
    save = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")}
    whole = make(root, tmp_path, **save)
    wanted = [step(whole, i) for i in range(2)]
    whole.save(1)
    wanted.append(step(whole, 2))
    end = adapters(whole)
    whole.close()
    folder = tmp_path / "saved" / "iter_0000001"
    stored = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    assert stored < (root / "policy" / "model.safetensors").stat().st_size * 3
    assert (folder / "adapter" / "adapter_config.json").is_file()

    resumed = make(root, tmp_path, "b", **save)
    assert resumed.start_rollout_id == 2
    assert step(resumed, 2) == wanted[2]
    assert all(torch.equal(end[name], tensor) for name, tensor in adapters(resumed).items())
    resumed.close()

    command = ["--load", save["save"], "--hf-checkpoint", str(root / "policy"), "--iteration", "1"]
    export([*command, "--output-dir", str(tmp_path / "peft")])
    stored, written = (
        load_file(d / "adapter_model.safetensors") for d in (folder / "adapter", tmp_path / "peft")
    )
    assert stored.keys() == written.keys() and all(torch.equal(stored[n], written[n]) for n in stored)
    export([*command, "--merge", "--output-dir", str(tmp_path / "merged")])
    whole_weights = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(root / "policy" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    a, b = (stored[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    torch.testing.assert_close(whole_weights[f"{name}.weight"], base[f"{name}.weight"] + 2.0 * (b @ a))
    assert torch.equal(whole_weights["model.norm.weight"], base["model.norm.weight"])

    started = make(root, tmp_path, "c", lora_load=str(folder / "adapter"))
    before = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in adapters(started).items())
    started.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_rank": 8}, "--lora-rank must be 4 as in the checkpoint, got 8"),
        ({"lora_rank": 0}, "a checkpoint must hold whole weights here, got adapters of rank 4"),
        ({"target_modules": ["q_proj"]}, "--target-modules must be .*all-linear.* as in the checkpoint"),
        ({"exclude_modules": ["q_proj"]}, r"--exclude-modules must be \(\) as in the checkpoint"),
    ],
)
def test_other_adapters_than_the_checkpoints_are_refused(root, tmp_path, flags, message):
    save = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")}
    trainer = make(root, tmp_path, **save)
    trainer.save(0)
    trainer.close()
    with pytest.raises(ValueError, match=message):
        make(root, tmp_path, "b", **save, **flags)


def test_another_base_than_the_checkpoints_is_refused(root, tmp_path):
    """Another base is an error in a run that resumes, and when adapters are merged. The same base may have another
    name."""
    save = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")}
    trainer = make(root, tmp_path, **save)
    trainer.save(0)
    trainer.close()
    message = (
        "the base of adapters must be the weights that they were trained over, got others for .*iter_0000000"
    )
    other = str(root / "reference")  # it has the same shapes
    with pytest.raises(ValueError, match=message):
        make(root, tmp_path, "b", **save, hf_checkpoint=other, ref_load=other)
    destroy_parallel()
    command = ["--load", save["save"], "--hf-checkpoint", other, "--output-dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=message):
        export([*command, "--merge"])
    copied = tmp_path / "copied"
    copytree(root / "policy", copied)
    make(root, tmp_path, "c", **save, hf_checkpoint=str(copied), ref_load=str(copied)).close()


def test_dropout_is_drawn_anew_in_training_alone(root, tmp_path):
    """For one batch, scoring draws no masks, and each forward in training draws masks once."""
    trainer = make(root, tmp_path, lora_dropout=0.5, lr=0.1)
    step(trainer)  # B is no longer zero
    model, batch = trainer.policy.model, sequences(2)
    with torch.no_grad():
        model.eval()
        first, again = (packed_logits(model, batch) for _ in range(2))
        model.train()
        drawn, other = (packed_logits(model, batch) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(drawn, other) and not torch.equal(drawn, first)
    trainer.close()


def test_recomputed_layers_draw_the_same_dropout(root, tmp_path):
    """Without equal masks, the backward would belong to another function than the forward."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = []
    for name, overrides in (("a", {}), ("b", full)):
        trainer = make(root, tmp_path, name, lora_dropout=0.5, overrides=overrides)
        found.append([step(trainer, i) for i in range(2)])
        trainer.close()
    plain, recomputed = found
    assert plain == recomputed


def test_a_checkpoint_of_whole_weights_is_no_checkpoint_of_adapters(root, tmp_path):
    save = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")}
    trainer = make(root, tmp_path, lora_rank=0, **save)
    trainer.save(0)
    trainer.close()
    with pytest.raises(ValueError, match="--load must hold adapters with --lora-rank, got whole weights"):
        make(root, tmp_path, "b", **save)
    destroy_parallel()
    over = make(root, tmp_path, "c", finetune=True, **save)  # the adapters are for these weights
    step(over)
    over.close()
