"""Shapes of Qwen3-Next and Qwen3.5: parameters, kinds of layers, and what memory is planned for."""

from __future__ import annotations

import json

import pytest
from hybrid_shapes import TEXT_ONLY
from make_model import build_config, build_model

from slime.model_shape import Shape
from slime.models import decoder_of


@pytest.mark.parametrize("arch", TEXT_ONLY)
def test_the_shapes_of_hybrid_models(arch):
    config = build_config(arch)
    said = json.loads(config.to_json_string(use_diff=False))
    assert build_model(config, 0, "meta").num_parameters() == TEXT_ONLY[arch]
    assert [layer.kind for layer in decoder_of(said).layers[:4]].count("gated_delta_net") == 3
    assert 0.999 * TEXT_ONLY[arch] < Shape.of(said).params < TEXT_ONLY[arch]
