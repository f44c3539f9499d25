"""GLM-4.7-Flash: latent attention, one dense layer, then experts as in GLM-4.5."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.families.latent.deepseek_v3 import DEEPSEEK_V3
from slime.models.latent import read_latent
from slime.models.reading import sparse_layers, with_predictions


def sparse(hf: Hf) -> tuple[bool, ...]:
    """Returns, per layer, whether it has experts. Published files have `first_k_dense_replace`, and transformers writes
    a list. Without both, the first layer is dense."""
    kinds, depth = hf.get("mlp_layer_types"), hf["num_hidden_layers"]
    if kinds is None:
        return sparse_layers({"first_k_dense_replace": 1, **hf})
    if len(kinds) != depth or not {"dense", "sparse"}.issuperset(kinds):
        raise ValueError(
            f"mlp_layer_types in config.json must have dense or sparse for each of the {depth} layers, got {kinds}; "
            "the checkpoint is incomplete"
        )
    return tuple(kind == "sparse" for kind in kinds)


def read(hf: Hf) -> Decoder:
    return with_predictions(hf, read_latent(hf, sparse(hf)))


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3, model_type="glm4_moe_lite", title="GLM-4.7-Flash, experts", models="30B-A3B", read=read
)
