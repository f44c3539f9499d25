"""Tests PEFT directories: both programs compute the same logits, and a directory is written as it was read, bit for
bit."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from lora_cases import EXPERTS, adapted, randomise
from megatron_cases import hf_logits, make_config, packed_logits, sequences, tiny_checkpoint
from safetensors.torch import load_file, save_file

from slime.megatron_backend.checkpoint.merged import merged
from slime.megatron_backend.checkpoint.peft import export_adapters, load_peft, save_peft
from slime.megatron_backend.checkpoint.weights import export_hf, live, save_hf
from slime.megatron_backend.lora.install import without_adapters
from slime.megatron_backend.model.gpt import unwrapped
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import lora
from slime.models.lora import Lora, read_peft

TARGETS = {
    "qwen3": None,
    "llama": ["q_proj", "v_proj", "down_proj"],
    "glm4": ["o_proj", "k_proj"],
    "qwen3_next": None,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("peft")
    for kind in TARGETS:
        tiny_checkpoint(root / kind, kind)
    tiny_checkpoint(root / "qwen3_moe", "qwen3_moe", **EXPERTS)
    tiny_checkpoint(root / "wider", "qwen3", intermediate_size=128)
    return root


@pytest.fixture
def one(tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


def umask() -> int:
    os.umask(found := os.umask(0o077))
    return found


def loaded_by_peft(base: Path, adapter: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    return peft.PeftModel.from_pretrained(model, adapter).eval()


@pytest.mark.parametrize("kind", ["qwen3", "llama", "glm4"])
def test_peft_computes_the_same_logits(root, one, tmp_path, kind):
    base, batch = root / kind, sequences(1)
    model = adapted(base, ddp=False, target_modules=TARGETS[kind], lora_alpha=6.0)
    randomise(model)
    save_peft(model, tmp_path / "adapter", str(base))
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "adapter").iterdir()}
    assert modes == {0o666 & ~umask()}, "who may read the settings may read the weights"
    theirs = loaded_by_peft(base, tmp_path / "adapter")
    wanted = hf_logits(theirs, batch)
    with torch.no_grad():
        got = packed_logits(model, batch)
        with without_adapters(unwrapped(model)):
            alone = packed_logits(model, batch)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
    with theirs.disable_adapter():
        torch.testing.assert_close(alone, hf_logits(theirs, batch), rtol=1e-4, atol=2e-5)
    assert (got - alone).abs().max() > 0.1

    merged_weights = dict(export_hf(model, merged(model, live)))
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        if name in merged_weights:
            torch.testing.assert_close(merged_weights[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_directory_of_peft_comes_back_bit_for_bit(root, one, tmp_path, kind):
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(root / kind, dtype=torch.float32)
    config = peft.LoraConfig(
        r=6, lora_alpha=9, target_modules=TARGETS[kind] or "all-linear", task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    lora, base = read_peft(tmp_path / "theirs")
    assert (lora.rank, lora.alpha, base) == (6, 9.0, str(root / kind))
    flags = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}
    ours = adapted(root / kind, ddp=False, **flags)
    load_peft(ours, tmp_path / "theirs")
    save_peft(ours, tmp_path / "ours", base)
    first, second = (load_file(tmp_path / x / "adapter_model.safetensors") for x in ("theirs", "ours"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_peft(tmp_path / "ours") == (lora, base)


def test_excluded_modules_have_no_adapter_as_in_peft(root, one, tmp_path):
    """PEFT builds adapters for the same modules from the same settings, and computes the same logits."""
    excluded = ["down_proj", "model.layers.1.self_attn.q_proj"]
    base, batch = root / "qwen3", sequences(1)
    model = adapted(base, ddp=False, exclude_modules=excluded)
    randomise(model)
    save_peft(model, tmp_path / "adapter", str(base))
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", exclude_modules=excluded, task_type="CAUSAL_LM"
    )
    wanted = {name for name, _ in peft.get_peft_model_state_dict(peft.get_peft_model(hf, config)).items()}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == wanted
    assert not any("down_proj" in name or "layers.1.self_attn.q_proj" in name for name in stored)
    assert any("layers.0.self_attn.q_proj" in name for name in stored)
    theirs = loaded_by_peft(base, tmp_path / "adapter")
    with torch.no_grad():
        got = packed_logits(model, batch)
    torch.testing.assert_close(got, hf_logits(theirs, batch), rtol=1e-4, atol=2e-5)
    assert read_peft(tmp_path / "adapter")[0].excluded == tuple(sorted(excluded))


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe"])
def test_merged_weights_compute_what_the_adapters_do(root, one, tmp_path, kind):
    """The test includes gated delta nets and experts, whose modules have other names in transformers than in files."""
    model = adapted(root / kind, ddp=False, lora_rank=8)
    randomise(model)
    batch = sequences(2)
    with torch.no_grad():
        wanted = packed_logits(model, batch)
    save_hf(model, root / kind, tmp_path / "merged", read=merged(model, live))
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(wanted, hf_logits(theirs.eval(), batch), rtol=1e-4, atol=5e-5)
    names = [name for name, _ in export_adapters(model)]
    assert len(names) == len(set(names)) > 0
    assert any(".experts.3.down_proj." in name for name in names)
    assert any(".linear_attn.in_proj_qkvz." in name for name in names) == (kind == "qwen3_next")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora in .* must be False, got True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern in .* must be {}, got {'q_proj': 2}"),
        ({"target_modules": ".*_proj"}, "target_modules in .* must be a list of module names, got '.*_proj'"),
        ({"r": 0}, "r and lora_alpha in .* must be numbers above 0, got 0"),
        ({"peft_type": "ADALORA"}, "peft_type in .* must be LORA, got ADALORA"),
        ({"task_type": "SEQ_CLS"}, "task_type in .* must be CAUSAL_LM, got SEQ_CLS"),
        ({"init_lora_weights": "mica"}, "init_lora_weights in .* must be True, got mica"),
        *(
            ({"init_lora_weights": kind}, f"init_lora_weights in .* must leave the base as it is, got {kind}")
            for kind in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga")
        ),
        ({"trainable_token_indices": [5]}, "trainable_token_indices in .* must be None"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens in .* must be None"),
        ({"use_qalora": True}, "use_qalora in .* must be False"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora in .* must be None"),
        ({"kasa_config": {"x": 1}}, "kasa_config in .* must be None"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying in .* must be False"),
        ({"next_years_lora": {"x": 1}}, "must have known settings alone, got next_years_lora"),
    ],
)
def test_settings_that_this_version_lacks_are_refused(tmp_path, change, message):
    save_file({}, tmp_path / "adapter_model.safetensors")
    config = Lora(4, 8.0).peft("base", ["layers.0.q_proj"]) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_peft(tmp_path)


def test_an_adapter_of_another_base_is_refused(root, one, tmp_path):
    save_peft(adapted(root / "wider", ddp=False), tmp_path, "wider")
    with pytest.raises(
        ValueError, match=r"gate_proj.lora_B.weight must have shape \[96, 4\] .* got \[128, 4\]"
    ):
        load_peft(adapted(root / "qwen3", ddp=False), tmp_path)
    with pytest.raises(ValueError, match=r"must hold the adapters .* got \d+ tensors unexpected in"):
        load_peft(adapted(root / "qwen3", ddp=False, target_modules=["q_proj"]), tmp_path)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_proj", "c_attn"],
            "--target-modules must name modules of the model, got c_attn, .* it has down_proj, ",
        ),
        (["all-linear", "q_proj"], "--target-modules must be all-linear alone or names"),
    ],
)
def test_targets_that_match_nothing_are_refused(root, one, targets, message):
    with pytest.raises(ValueError, match=message):
        adapted(root / "qwen3", target_modules=targets)


@pytest.mark.parametrize("kind", [True, False, "gaussian", "orthogonal", "pissa", "olora"])
def test_an_adapter_of_peft_is_the_model_that_peft_has_or_is_refused(root, one, tmp_path, kind):
    """For every initialisation of PEFT, the logits are those of its adapter over the plain base."""
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "qwen3", dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=kind, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if "lora_B" in name:
                x.add_(0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    theirs.save_pretrained(tmp_path / "theirs")
    if kind in ("pissa", "olora"):
        with pytest.raises(ValueError, match="must leave the base as it is"):
            read_peft(tmp_path / "theirs")
        return
    assert read_peft(tmp_path / "theirs")[0].rank == 4
    ours = adapted(root / "qwen3", ddp=False, lora_alpha=8.0, target_modules=["q_proj", "v_proj"])
    load_peft(ours, tmp_path / "theirs")
    batch = sequences(2)
    with torch.no_grad():
        found, wanted = packed_logits(ours, batch), hf_logits(theirs.eval(), batch)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=5e-5)


def test_every_setting_of_this_peft_is_known(tmp_path):
    """A field of PEFT at its default is accepted, so a new field needs a decision only if it is set."""
    save_file({}, tmp_path / "adapter_model.safetensors")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path)
    assert read_peft(tmp_path)[0].targets == ("q_proj",)
    known = {*lora._NEUTRAL, *lora._READ, *lora._NO_EFFECT}
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= known


@pytest.mark.parametrize(
    "name", ["arrow_config", "kasa_config", "use_bdlora", "velora_config", "monteclora_config"]
)
def test_the_empty_settings_of_a_variant_choose_it(tmp_path, name):
    """PEFT makes the variant with its defaults from {}."""
    save_file({}, tmp_path / "adapter_model.safetensors")
    peft.LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, name: {}}))
    with pytest.raises(ValueError, match=f"{name} in .* must be None, got {{}}"):
        read_peft(tmp_path)
