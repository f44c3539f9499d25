"""Tests how Gemma 4's config.json is read: heads per kind of layer, and the parts that are not supported."""

from __future__ import annotations

from typing import Any

import pytest
from make_model import build_config, build_model

from slime.config import Config
from slime.models import family_for, read_decoder
from slime.models.decoder import Experts, WideHeads
from slime.plan.model_shape import Shape
from slime.rules.heads import check_attention

HF: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 262144,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
}
WRITTEN = {i: {"head_dim": 512, "num_key_value_heads": 4} for i in ("05", "11")}
"""How transformers writes the heads of layers without a window."""


def test_layers_have_their_own_heads():
    decoder = read_decoder(HF)
    assert decoder.wide == WideHeads(groups=4, head_dim=512)
    assert [layer.kind for layer in decoder.layers] == (["normed_values"] * 5 + ["keys_as_values"]) * 2
    full, local = decoder.layers[5].attention, decoder.layers[0].attention
    assert full.params == 5376 * 512 * (32 + 4 + 32) and local.params == 5376 * 256 * (32 + 16 + 16 + 32)
    assert full.cache == 2 * 4 * 512 and local.cache == 2 * 16 * 256
    assert [rope.size for rope in decoder.ropes] == [512, 256]
    frequencies = decoder.ropes[0].frequencies()
    assert (frequencies[:64] > 0).all() and not frequencies[64:].any()
    published = {key: value for key, value in HF.items() if "global" not in key}
    assert read_decoder({**published, "per_layer_config": WRITTEN}) == decoder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input in config.json must be 0, got 256",
        ),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers in config.json must be 0, got 10"),
        ({"enable_moe_block": True}, "enable_moe_block in config.json must be False, got True"),
        ({"num_experts": 8}, "config.json must give top_k_experts, got none"),
        (
            {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704, "enable_moe_block": False},
            "enable_moe_block in config.json must be True, got False",
        ),
        ({"attention_k_eq_v": False}, "attention_k_eq_v in config.json must be True, got False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention in config.json must be None"),
        (
            {"per_layer_config": {"05": {"head_dim": 128}}},
            "must give one size of heads to the layers without a",
        ),
    ],
)
def test_parts_that_are_not_supported(changed, message):
    with pytest.raises(ValueError, match=message):
        read_decoder({**HF, **changed})


def test_experts_are_next_to_the_mlp():
    """The card of the model has 25.2 B parameters, 3.8 B of them for a token with the embedding."""
    config = build_config("gemma-4-26b-a4b")
    hf = config.to_dict() | config.text_config.to_dict() | {"model_type": "gemma4"}
    decoder, shape = read_decoder(hf), Shape.of(hf)
    assert decoder.experts == Experts(128, 8, 704, shared=2112, parallel=True) and all(decoder.sparse)
    assert decoder.wide == WideHeads(groups=2, head_dim=512)
    assert f"{shape.params / 1e9:.1f}" == "25.2"
    assert f"{(shape.active + shape.vocab * shape.hidden) / 1e9:.1f}" == "3.8"
    text = build_model(config.text_config, 0, "meta").num_parameters()
    assert 0 < text - shape.params < 1e-4 * text
    family = family_for(hf)
    assert family.predicted(hf)[0] == "model.vision_tower."
    row, names = family.find("decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight")
    assert names == ("model.language_model.layers.3.experts.5.gate_up_proj",) and row.is_expert


def test_null_embeddings_per_layer_mean_none():
    assert read_decoder({**HF, "hidden_size_per_layer_input": None}) == read_decoder(HF)
    with pytest.raises(ValueError, match="config.json must give hidden_size_per_layer_input, got none"):
        read_decoder({name: value for name, value in HF.items() if name != "hidden_size_per_layer_input"})


def test_ranks_share_the_fewer_heads():
    check_attention(Config.from_flat({"tensor_model_parallel_size": 4}), read_decoder(HF))
    with pytest.raises(ValueError, match="must divide the 4 key heads of layers without a window, got 8"):
        check_attention(Config.from_flat({"tensor_model_parallel_size": 8}), read_decoder(HF))
