"""Tests the other models of runs with images: a reference, a critic or a teacher takes the policy's images, or the
start of the run is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES
from vision_architectures import VISION_ARCHITECTURES

from slime.checkpoints.checkpoint_dir import HF_INDEX
from slime.config import Config
from slime.rules.images.roles import check_towers

KEYS = {"multimodal_keys": {"image": "images"}}
NEEDED = "must name a model with a vision tower, because prompts have images"
SAME = "must take the images of --hf-checkpoint, got .*, a"


def written(folder: Path, name: str, **changed: Any) -> str:
    """Writes the config.json of a model and an index without files. Returns the folder."""
    row = {**ARCHITECTURES, **VISION_ARCHITECTURES}[name]
    fields = row.config_fields() | changed
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": row.family, "hidden_act": "silu", **fields})
    )
    (folder / HF_INDEX).write_text('{"weight_map": {}}')
    return str(folder)


def of_role(role: str, directory: str) -> dict[str, Any]:
    """Returns the flags of a run with another model."""
    return {
        "reference": {"ref_load": directory, "use_kl_loss": True, "kl_loss_coef": 0.1},
        "critic": {"critic_load": directory, "advantage_estimator": "ppo"},
        "teacher": {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": directory},
        "served": {"use_opd": True, "opd_type": "vllm", "opd_teacher_model": [f"math={directory}"]},
    }[role]


ROLES = {
    "reference": "--ref-load",
    "critic": "--critic-load",
    "teacher": "--opd-teacher-load",
    "served": "--opd-teacher-model math",
}


def check(tmp_path: Path, role: str, other: str, policy: str = "qwen3-vl-4b", **changed: Any) -> None:
    mine, its = written(tmp_path / "mine", policy), written(tmp_path / "its", other, **changed)
    check_towers(Config.from_flat({"hf_checkpoint": mine, **KEYS, **of_role(role, its)}))


@pytest.mark.parametrize("role", ROLES)
def test_a_text_model_is_an_error(tmp_path: Path, role: str) -> None:
    with pytest.raises(ValueError, match=f"{ROLES[role]} {NEEDED}.*, got .*, a qwen3 without one"):
        check(tmp_path, role, "qwen3-4b")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("policy", "other", "differs"),
    [
        ("qwen3-vl-4b", "qwen2.5-vl-7b", "qwen2_5_vl with other values per patch, 1176 instead of 1536"),
        ("gemma-3-4b", "qwen3-vl-4b", "qwen3_vl with other ids of images, 151655 instead of 262144"),
    ],
)
def test_another_family_of_towers_is_an_error(
    tmp_path: Path, role: str, policy: str, other: str, differs: str
) -> None:
    with pytest.raises(ValueError, match=f"{ROLES[role]} {SAME} {differs}"):
        check(tmp_path, role, other, policy)


@pytest.mark.parametrize("role", ROLES)
def test_a_teacher_may_have_another_size(tmp_path: Path, role: str) -> None:
    """A teacher has its own shape. The other models have the policy's."""
    if role in ("teacher", "served"):
        return check(tmp_path, role, "qwen3-vl-30b-a3b")
    with pytest.raises(ValueError, match=f"{ROLES[role]} {SAME} qwen3_vl_moe with other sizes of the tower"):
        check(tmp_path, role, "qwen3-vl-30b-a3b")


@pytest.mark.parametrize("role", ROLES)
def test_the_same_model_and_text_runs_pass(tmp_path: Path, role: str) -> None:
    check(tmp_path, role, "qwen3-vl-4b")
    text = written(tmp_path / "text", "qwen3-4b")
    check_towers(Config.from_flat({"hf_checkpoint": text, **of_role(role, text)}))


def test_a_served_teacher_of_an_unknown_family_passes(tmp_path: Path) -> None:
    """Engines serve frozen models of families that cannot be trained."""
    check(tmp_path, "served", "qwen3-vl-4b", model_type="mistral3")
