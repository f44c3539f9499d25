"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention. Each layer has an indexer, whose rotary embedding pairs the halves
of a head, unlike the attention's."""

from __future__ import annotations

from slime.models.decoder import Decoder, Hf
from slime.models.families.latent.glm4_moe_lite import sparse
from slime.models.family import Family
from slime.models.latent import SPARSE_LAYER, read_sparse
from slime.models.reading import only
from slime.models.rows import ENDS, IGNORED, later_predictions

DEFAULTS: dict[str, object] = {
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
"""Values of transformers' DeepseekV32Config."""


def read(hf: Hf) -> Decoder:
    only(hf, indexer_rope_interleave=False)
    shared = [False] * hf["num_hidden_layers"]
    return read_sparse(hf, sparse(hf), interleaved=False, shared=shared)


DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepSeek-V3.2, experts, sparse attention",
    "V3.2, V3.2-Exp",
    ENDS + SPARSE_LAYER,
    read,
    defaults=DEFAULTS,
    ignored=IGNORED,
    prediction=later_predictions(SPARSE_LAYER),
    flags=(("qk_layernorm", lambda hf: True),),
)
