"""Tests the check of a model family on a right family, with a real engine, and on wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_cases import CASES, engine_shape
from megatron_cases import tiny_checkpoint

from vime.testing import check_family
from vime.testing.families import LOG_PROBS, register_family


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, "llama", **engine_shape(CASES["llama"]))
    return folder


@pytest.mark.e2e
@pytest.mark.slow
def test_a_right_family_passes(llama: Path) -> None:
    report = check_family(llama)
    assert report.parameters == 184_704
    assert 0 < max(report.log_probs.values()) < LOG_PROBS and 0 < max(report.gradients.values()) < 1e-4
    assert report.engine is not None and report.engine.keys() == {"before", "after", "again"}
    assert 0 < report.engine["before"] == report.engine["again"] < LOG_PROBS


WRONG = {
    "SWAPPED": r"one rank must be those of transformers, got a difference of .*: model.layers.{}.mlp.gate_proj.weight "
    r"and model.layers.{}.mlp.up_proj.weight must not change places",
    "OTHER_NORMS": r"model.layers.{}.input_layernorm.weight and model.layers.{}.post_attention_layernorm.weight must",
    "ROTARY": r"rotary embedding 0 of the Decoder must have transformers' frequencies, got .* for pair \d+ where",
    "SCALE": r"the output of layer 0 is the first that differs, by ",
    "PLAN": r"the plan must count 184704 elements of matrices, as in the files, got 184718",
    "LESS": r"the checkpoint must run in the trainer, got an error[\s\S]*decoder.final_layernorm.weight has no row",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_family_is_named(llama: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=WRONG[name].replace("{}", r"\{\}")):
        check_family(llama, family=f"kit_families.{name}", engine=None)
    register_family("slime.models.families.llama.LLAMA")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="family must be the path of a Family, got 'kit_families.read_scale'"
    ):
        check_family(tmp_path, family="kit_families.read_scale")
    with pytest.raises(ValueError, match="must be a directory with a config.json"):
        check_family(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(
        ValueError, match="must hold model.safetensors or model.safetensors.index.json, got neither"
    ):
        check_family(tmp_path, engine=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "glm-5"])
def test_other_families_pass(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tiny_checkpoint(tmp_path, case.kind, **case.shape)
    report = check_family(tmp_path, engine=None)
    assert report.parameters > 100_000 and report.engine is None


@pytest.mark.slow
def test_a_family_that_transformers_lacks(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "mimo", **CASES["mimo"].shape)
    assert check_family(tmp_path, reference=model, engine=None).parameters == 74_112


@pytest.mark.e2e
@pytest.mark.slow
def test_published_gemma_4_passes(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "gemma4", **engine_shape(CASES["gemma4-published"]))
    report = check_family(tmp_path, engine={"hf_overrides": {"architectures": ["Gemma4ForCausalLM"]}})
    assert report.engine is not None and max(report.engine.values()) < LOG_PROBS
