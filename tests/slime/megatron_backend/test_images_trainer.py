"""Trains a tiny Qwen2.5-VL and a tiny Gemma 3 on rollouts with and without images: log-probs of policy and reference,
an optimizer step, the update for the engines, a checkpoint, and the run that resumes from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import tiny_checkpoint
from safetensors.torch import load_file
from torch import Tensor
from tower_cases import KEYS, image_logits, make_samples, read_vision
from trainer_cases import exported, make_config, rank_data

from slime.checkpoints.hf_config import check_checkpoint_shapes, read_hf_config
from slime.data.media.media import list_media
from slime.megatron_backend.checkpoint.export import export_checkpoint
from slime.megatron_backend.model.gpt import unwrap
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.models.vision import Vision
from slime.roles import POLICY
from slime.types import Sample

GRIDS = [[(1, 4, 8)], [], [(1, 6, 4), (1, 4, 4)], [(1, 8, 8)]]
"""Each group's images. One group has none."""


def samples_of(root: Path, kind: str) -> list[Sample]:
    """Returns four groups of two samples that share the prompt and its images."""
    rng, data = random.Random(0), make_samples(read_vision(root / kind / "policy"), GRIDS)
    found = []
    for group, tokens in enumerate(data["tokens"]):
        for index in range(2):
            response = [rng.randrange(90) for _ in range(rng.randint(3, 7))]
            found.append(
                Sample(
                    index=len(found),
                    group_index=group,
                    tokens=[*tokens[:-5].tolist(), *response],
                    response_length=len(response),
                    rollout_log_probs=[-4.5] * len(response),
                    reward=float(index),
                    multimodal_train_inputs=data["multimodal_train_inputs"][group],
                    status=Sample.Status.COMPLETED,
                )
            )
    return found


def image_key(sample: Sample, vision: Vision) -> str:
    (medium,) = list_media(sample.multimodal_train_inputs, vision)
    return medium.key


@torch.no_grad()
def hf_log_probs(hf: Any, sample: Sample) -> Tensor:
    """Returns transformers' log-probs of the response."""
    tokens = torch.tensor(sample.tokens)
    one: Any = {"tokens": [tokens], "multimodal_train_inputs": [sample.multimodal_train_inputs]}
    logits = image_logits(hf, one)[:-1].log_softmax(-1)
    return logits.gather(1, tokens[1:, None])[-sample.response_length :, 0]


def config_of(root: Path, **flags: Any) -> Any:
    flags = {"save": str(root / "saved"), "max_tokens_per_gpu": 96, "multimodal_keys": KEYS} | flags
    return make_config(root, **flags)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for kind in ("qwen2_5_vl", "gemma3"):
        for seed, name in enumerate(("policy", "reference")):
            torch.manual_seed(seed)
            tiny_checkpoint(root / kind / name, kind)
    return root


@pytest.mark.parametrize(
    ("kind", "train_vision"),
    [(kind, train_vision) for kind in ("qwen2_5_vl", "gemma3") for train_vision in (False, True)],
)
def test_a_run_trains_on_images(root: Path, tmp_path: Path, kind: str, train_vision: bool) -> None:
    import transformers

    root = root / kind
    samples = samples_of(root.parent, kind)
    config = config_of(root, train_vision=train_vision, use_kl_loss=True, kl_loss_coef=0.1)
    trainer = MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store")
    try:
        before = exported(trainer)
        data = rank_data(config, samples)
        calls: list[int] = []
        tower = unwrap(trainer.models[POLICY.name]).vision_model
        hook = tower.register_forward_hook(
            lambda _, args, kw, ___: calls.append(len(args[0] if kind == "gemma3" else kw["grid_thw"])),
            with_kwargs=True,
        )
        trainer.train(0, data)
        hook.remove()
        if not train_vision:
            assert sum(calls) == 4, "a frozen tower computes each of the 4 images once"
            assert (
                trainer.batches.towers.find(tower, image_key(samples[0], read_vision(root / "policy")))
                is None
            )
        hf = transformers.AutoModelForImageTextToText.from_pretrained(root / "reference").eval()
        for i, index in enumerate(data["sample_indices"]):
            wanted = hf_log_probs(hf, samples[index])
            torch.testing.assert_close(data["ref_log_probs"][i], wanted, rtol=0, atol=1e-5)
        after = exported(trainer)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        tower = {name for name in before if name.startswith(read_vision(root / "policy").files)}
        still = {name for name in tower if name.endswith("k_proj.bias")}  # it changes no share of attention
        assert tower and moved & (tower - still) == (tower - still if train_vision else set())
        assert moved - tower == before.keys() - tower
        trainer.weights_file()
        (file,) = (root / "weights").glob("**/*.safetensors")
        published = load_file(file)
        assert published.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in published.items())
        file.unlink()
        trainer.save(0)
    finally:
        trainer.close()
    resumed = MegatronTrainer(
        config_of(root, train_vision=train_vision, load=str(root / "saved")),
        0,
        1,
        init_method=f"file://{tmp_path}/again",
    )
    try:
        assert all(torch.equal(tensor, after[name]) for name, tensor in exported(resumed).items())
    finally:
        resumed.close()
    export_checkpoint(make_config(root, load=str(root / "saved")), None, tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in written.items())


def test_shapes_of_the_tower_are_not_those_of_the_decoder(root: Path) -> None:
    """The tower has MLPs under the decoder's names of tensors, and more layers or fewer."""
    for kind in ("qwen2_5_vl", "gemma3"):
        folder = root / kind / "policy"
        check_checkpoint_shapes(folder, read_hf_config(folder))
