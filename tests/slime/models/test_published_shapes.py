"""Compares shapes of published models with their model cards, and shapes of hybrid models with the planner."""

from __future__ import annotations

import json

import pytest
from hybrid_shapes import TEXT_ONLY
from make_model import build_config, build_model, stored_tensors

from slime.models import read_decoder
from slime.plan.flops import ForwardFlops
from slime.plan.model_shape import Shape


@pytest.mark.parametrize("arch", TEXT_ONLY)
def test_the_shapes_of_hybrid_models(arch):
    config = build_config(arch)
    said = json.loads(config.to_json_string(use_diff=False))
    assert build_model(config, 0, "meta").num_parameters() == TEXT_ONLY[arch]
    assert [layer.kind for layer in read_decoder(said).layers[:4]].count("gated_delta_net") == 3
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
