"""Compares shapes of published models with their model cards, and shapes of hybrid models with the planner."""

from __future__ import annotations

import json

import pytest
from hybrid_shapes import TEXT_ONLY
from make_model import build_config, build_model, stored_tensors
from transformers import AutoConfig

from slime.models import family_for, read_decoder
from slime.plan.flops import ForwardFlops
from slime.plan.model_shape import Shape


@pytest.mark.parametrize("arch", TEXT_ONLY)
def test_the_shapes_of_hybrid_models(arch):
    config = build_config(arch)
    said = json.loads(config.to_json_string(use_diff=False))
    assert build_model(config, 0, "meta").num_parameters() == TEXT_ONLY[arch]
    states = [layer for layer in read_decoder(said).layers[:4] if layer.attention.state]
    assert len(states) == (2 if arch.startswith("nemotron") else 3)
    assert 0.999 * TEXT_ONLY[arch] < Shape.of(said).params < TEXT_ONLY[arch]


def test_glm_has_the_tensors_of_the_published_one():
    """The model has 110,468,824,832 elements. This project leaves out those that predict further tokens: a layer, an
    embedding, a head, three norms and the matrix that joins the two inputs."""
    model = build_model(build_config("glm-4.5-air"), 0, "meta")
    count = {name: tensor.numel() for name, tensor in stored_tensors(model)}
    layer = sum(number for name, number in count.items() if name.startswith("model.layers.45."))
    further = layer + 2 * 151552 * 4096 + 3 * 4096 + 2 * 4096 * 4096
    assert sum(count.values()) + further == 110_468_824_832


def test_what_a_token_uses_is_as_published():
    """A token uses 3.35 billion elements; the card rounds to 3.3. They are half of its FLOPs, without its pair of
    attention, and the embedding."""
    config = json.loads(build_config("qwen3-30b-a3b").to_json_string(use_diff=False))
    pair = 48 * 4 * 32 * 128
    assert f"{((ForwardFlops(config)(1, 1) - pair) / 2 + 151936 * 2048) / 1e9:.2f}" == "3.35"
    config = json.loads(build_config("glm-4.5-air").to_json_string(use_diff=False))
    pair = 46 * 4 * 96 * 128  # 12.2 without the head and the embedding; the card rounds to 12
    assert f"{(ForwardFlops(config)(1, 0) - pair) / 2e9:.1f}" == "12.2"


MINIMAX = {
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "float8_e4m3fn",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}
"""Fields of the config.json of MiniMaxAI/MiniMax-M2. M2.1 and M2.5 have the same architecture."""


def test_minimax_is_read_as_published_and_as_transformers_writes_it():
    """The card has 229 B parameters, 10 B of them for a token. transformers writes the rotated dimensions as a
    fraction."""
    decoder, shape = read_decoder(MINIMAX), Shape.of(MINIMAX)
    assert f"{shape.params / 1e9:.1f}" == "228.7" and f"{shape.active / 1e9:.1f}" == "9.8"
    assert decoder.ropes[0].size == 64 and decoder.qk_norm == "projection" and all(decoder.sparse)
    assert (decoder.experts.score, decoder.experts.bias, decoder.experts.groups) == ("sigmoid", True, None)
    plain = {name: value for name, value in MINIMAX.items() if name != "quantization_config"}
    written = json.loads(AutoConfig.for_model(**plain).to_json_string(use_diff=False))
    del written["rotary_dim"]
    assert read_decoder(written) == decoder
    family, scheme = family_for(MINIMAX), family_for(MINIMAX).scheme(MINIMAX)
    assert family.predicted(MINIMAX) == tuple(f"model.layers.{n}." for n in (62, 63, 64))
    assert scheme.converts("model.layers.0.block_sparse_moe.experts.3.w1") and not scheme.converts("lm_head")
