"""Tests which models without a family are recognised by their tensors, and the decoder that is read for them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slime.models import FAMILIES, family_for, read_decoder
from slime.models.llama_like import FIRST_LAYER, TENSORS, describe_tensors

HF: dict[str, Any] = {
    "model_type": "family_of_tomorrow",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
LAYER = (
    *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
)
QKV_BIAS = tuple(f"self_attn.{x}_proj.bias" for x in "qkv")
HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def described(*more: str, without: tuple[str, ...] = (), norm: int = 16, **settings: Any) -> dict[str, Any]:
    """Returns config.json with the record of a model with Llama's tensors and `more` per layer."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{i}.{name}" for i in (0, 1) for name in (*LAYER, *more) if name not in without]
    shapes = dict(zip(FIRST_LAYER, ((norm,), (64, 64)), strict=True))
    shapes = {name: shape for name, shape in shapes.items() if name in names}
    return {**HF, **settings, TENSORS: describe_tensors(names, shapes, FAMILIES)}


def test_tensors_of_llama_make_a_decoder():
    hf = described()
    assert family_for(hf).model_type == "family_of_tomorrow"
    decoder = read_decoder(hf)
    assert (decoder.qkv_bias, decoder.output_bias, decoder.qk_norm, decoder.post_norms) == (
        False,
        False,
        "",
        False,
    )
    assert decoder.pre_norms and len(decoder.layers) == 2 and decoder.activation == "swiglu"
    rows = {name for row in family_for(hf).rows for name in row.hf}
    assert "model.layers.{i}.input_layernorm.weight" in rows and "lm_head.weight" in rows


def test_names_and_config_describe_the_parts():
    assert read_decoder(described(*QKV_BIAS)).qkv_bias
    assert read_decoder(described(*QKV_BIAS, "self_attn.o_proj.bias")).output_bias
    assert read_decoder(described(*HEAD_NORMS)).qk_norm == "head"
    assert read_decoder(described(*HEAD_NORMS, norm=64)).qk_norm == "projection"
    after = described("post_feedforward_layernorm.weight", without=("input_layernorm.weight",))
    assert (read_decoder(after).pre_norms, read_decoder(after).post_norms) == (False, True)
    both = described("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
    assert (read_decoder(both).pre_norms, read_decoder(both).post_norms) == (True, True)
    windows = described(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    assert [layer.window for layer in read_decoder(windows).layers] == [6, None]
    assert [layer.window for layer in read_decoder(described(sliding_window=6)).layers] == [6, 6]
    unused = described(sliding_window=6, use_sliding_window=False)
    assert [layer.window for layer in read_decoder(unused).layers] == [None, None]
    two = {
        kind: {"rope_theta": theta} for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))
    }
    ropes = described(
        sliding_window=6, layer_types=["sliding_attention", "full_attention"], rope_parameters=two
    )
    assert [layer.rope for layer in read_decoder(ropes).layers] == [1, 0]
    assert [rope.theta for rope in read_decoder(ropes).ropes] == [1e6, 1e4]
    assert read_decoder(described(hidden_act="gelu_pytorch_tanh")).activation == "geglu"


@pytest.mark.parametrize(
    ("more", "without", "nearest"),
    [
        (("mixer.in_proj.weight", "mixer.A_log"), (), "qwen2 and llama and mistral"),
        (("mlp.gate.weight",), (), "qwen2 and llama and mistral"),
        ((), ("mlp.up_proj.weight",), "qwen2 and llama and mistral"),
        (HEAD_NORMS[:1], (), "qwen3"),
    ],
)
def test_other_tensors_keep_the_error_with_the_nearest_family(more, without, nearest):
    message = (
        f"got 'family_of_tomorrow', whose tensors are most like those of {nearest}; docs/adding-a-model.md"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        family_for(described(*more, without=without))


def test_settings_that_are_not_those_of_llama():
    with pytest.raises(
        ValueError, match="hidden_act in config.json must be silu or gelu_pytorch_tanh for a mo"
    ):
        read_decoder(described(hidden_act="relu2"))
    with pytest.raises(ValueError, match="rope_type in config.json must be one of .* got 'longrope'"):
        read_decoder(described(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}))
    with pytest.raises(ValueError, match="must be that of a family with experts"):
        read_decoder(described(num_experts=4))
