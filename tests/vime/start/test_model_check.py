"""Tests that a model without a family starts only if it computes what transformers computes: real child processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from slime.config import Config
from vime.start.model_check import LIMIT, with_model_note

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def config_of(directory: Path, kind: str, **settings: object) -> Config:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return Config.from_flat({"hf_checkpoint": str(directory)})


def test_a_model_like_llama_gets_a_note(tmp_path: Path) -> None:
    """Seed-OSS is Llama with biases of q, k and v. A plan for another machine only announces the comparison."""
    config = config_of(tmp_path, "seed_oss", attention_bias=True, attention_out_bias=False)
    (note,) = with_model_note(config, compares=True).notes
    measured = re.fullmatch(
        "model_type seed_oss has no family: its tensors are those of Llama, and config.json describes its layers. "
        r"Logits of 29 tokens of a tiny model differ from transformers' by at most (\S+) \(limit 1e-04\)",
        note,
    )
    assert measured and 0 < float(measured[1]) < LIMIT / 10
    (note,) = with_model_note(config, compares=False).notes
    assert note.endswith("; a run compares a tiny model with transformers before it starts")


def test_a_family_gets_no_note(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3")
    assert with_model_note(config, compares=True) is config


@pytest.mark.slow
def test_a_model_that_transformers_does_not_have(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "family_of_tomorrow"}))
    with pytest.raises(
        ValueError, match="A tiny model could not be compared with transformers: .*family_of_tomorrow"
    ):
        with_model_note(config, compares=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("cwm", {"head_dim": 32, "sliding_window": 8}),
        ("olmo2", {}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    ],
)
def test_more_models_like_llama(tmp_path: Path, kind: str, settings: dict[str, object]) -> None:
    """Windows in some layers with scaled rotary embeddings, and norms after the layers only."""
    (note,) = with_model_note(config_of(tmp_path, kind, **settings), compares=True).notes
    assert "differ from transformers' by at most" in note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("smollm3", {}),
        ("granite", {"embedding_multiplier": 2.0}),
        ("gemma", {"head_dim": 32}),
        ("helium", {"head_dim": 32}),
    ],
)
def test_tensors_of_llama_that_mean_something_else(
    tmp_path: Path, kind: str, settings: dict[str, object]
) -> None:
    """A layer without positions, a factor, norms with 1 + weight, rotation of neighbouring dimensions."""
    with pytest.raises(
        ValueError,
        match=rf"got '{kind}', whose tensors are most like those of qwen2 and llama and mistral\. A tiny model differs "
        r"from transformers by \S+ in a logit, more than 1e-04; docs/adding-a-model",
    ):
        with_model_note(config_of(tmp_path, kind, **settings), compares=True)
