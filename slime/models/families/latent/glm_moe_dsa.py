"""GLM-5: latent attention whose queries see the tokens that an indexer selects, three dense layers, then experts as in
GLM-4.5. In GLM-5.2, most layers see the tokens that an earlier layer selected (IndexCache, 2603.12201)."""

from __future__ import annotations

from dataclasses import replace

from slime.models.decoder import Decoder, Hf
from slime.models.families.latent.deepseek_v32 import DEEPSEEK_V32
from slime.models.families.latent.deepseek_v32 import DEFAULTS as OF_DEEPSEEK
from slime.models.families.latent.glm4_moe_lite import sparse
from slime.models.latent import SHARED, read_sparse
from slime.models.reading import only
from slime.models.rows import IGNORED

DEFAULTS = OF_DEEPSEEK | {"index_n_heads": 32}
"""Values of transformers' GlmMoeDsaConfig."""


def shared(hf: Hf) -> list[bool]:
    """Returns, per layer, whether it sees the tokens that an earlier layer selected. Files have a list, a pattern of
    the letters F and S, or the distance of the layers with an indexer and the number of the first."""
    depth = hf["num_hidden_layers"]
    kinds = hf.get("indexer_types") or hf.get("index_topk_pattern")
    if kinds is None:
        distance, first = max(hf.get("index_topk_freq") or 1, 1), hf.get("index_skip_topk_offset", 2)
        return [max(i - first + 1, 0) % distance != 0 for i in range(depth)]
    named = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]
    if len(named) != depth or not {"full", "shared"}.issuperset(named):
        raise ValueError(
            f"indexer_types in config.json must have full or shared for each of the {depth} layers, got {kinds}; the "
            "checkpoint is incomplete"
        )
    return [kind == "shared" for kind in named]


def read(hf: Hf) -> Decoder:
    only(hf, indexer_rope_interleave=True)
    return read_sparse(hf, sparse(hf), interleaved=True, shared=shared(hf))


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    title="GLM-5, experts, sparse attention",
    models="5 744B-A40B, 5.2",
    read=read,
    defaults=DEFAULTS,
    ignored=IGNORED + SHARED,
)
