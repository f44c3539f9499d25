"""Model families, one file per family. To add a family, write its file and add it to `_ALL` (docs/adding-a-model.md).

A family reads config.json into a `Decoder` and defines the table of its weights. Trainer, planner and flag checks read
the decoder, so no other file names a family. The package imports neither torch nor Megatron.
"""

from __future__ import annotations

from slime.models.decoder import Attention, Decoder, DeltaNet, Experts, Hf, Layer, Mamba
from slime.models.families.gemma2 import GEMMA2
from slime.models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from slime.models.families.gemma4 import GEMMA4, GEMMA4_TEXT
from slime.models.families.glm4 import GLM4
from slime.models.families.glm4_moe import GLM4_MOE
from slime.models.families.gpt_oss import GPT_OSS
from slime.models.families.latent.deepseek_v3 import DEEPSEEK_V3
from slime.models.families.latent.deepseek_v32 import DEEPSEEK_V32
from slime.models.families.latent.glm4_moe_lite import GLM4_MOE_LITE
from slime.models.families.latent.glm_moe_dsa import GLM_MOE_DSA
from slime.models.families.latent.kimi_k2 import KIMI_K2
from slime.models.families.latent.kimi_k25 import KIMI_K25
from slime.models.families.llama import LLAMA
from slime.models.families.mimo import MIMO
from slime.models.families.minimax_m2 import MINIMAX_M2
from slime.models.families.mistral import MISTRAL
from slime.models.families.nemotron_h import NEMOTRON_H
from slime.models.families.olmo3 import OLMO3
from slime.models.families.qwen.qwen2 import QWEN2
from slime.models.families.qwen.qwen2_5_vl import QWEN2_5_VL
from slime.models.families.qwen.qwen2_moe import QWEN2_MOE
from slime.models.families.qwen.qwen3 import QWEN3, QWEN3_MOE
from slime.models.families.qwen.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from slime.models.families.qwen.qwen3_next import QWEN3_NEXT
from slime.models.families.qwen.qwen3_vl import QWEN3_VL
from slime.models.families.qwen.qwen3_vl_moe import QWEN3_VL_MOE
from slime.models.family import Family
from slime.models.llama_like import NEAREST, TENSORS, like_family
from slime.models.vision import MOST_LAYERS
from slime.records.errors import FlagError

__all__ = [
    "FAMILIES",
    "MOST_LAYERS",
    "Attention",
    "Decoder",
    "DeltaNet",
    "Experts",
    "Family",
    "Hf",
    "Layer",
    "Mamba",
    "read_decoder",
    "family_for",
]

_ALL = (
    QWEN2,
    QWEN2_5_VL,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_TEXT,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    GEMMA2,
    GEMMA3,
    GEMMA3_TEXT,
    GEMMA4,
    GEMMA4_TEXT,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    KIMI_K2,
    KIMI_K25,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    MINIMAX_M2,
    MIMO,
    NEMOTRON_H,
    OLMO3,
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Maps `model_type` of config.json to its family."""


def family_for(hf: Hf) -> Family:
    """Returns the family of a parsed config.json, or of a model whose tensors are those of Llama. Raises FlagError,
    which lists the families and names the nearest, for any other model."""
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    if (like := like_family(hf)) is not None:
        return like
    nearest = (hf.get(TENSORS) or {}).get(NEAREST)
    raise FlagError(
        "model_type in config.json",
        f"be one of {', '.join(sorted(FAMILIES))}",
        f"{model_type!r}, whose tensors are most like those of {nearest}" if nearest else repr(model_type),
        "docs/adding-a-model.md shows how to add a family",
    )


def read_decoder(hf: Hf) -> Decoder:
    """Returns the decoder that config.json describes. Raises ValueError for an unsupported family, shape or setting,
    and for a field of a wrong type."""
    family = family_for(hf)
    for name, value in hf.items():
        least = 1 if name in _SIZES else 0 if name in _COUNTS else None
        if least is None or value is None:
            continue
        most = MOST_LAYERS if name in _LAYERS else _LARGEST
        if type(value) is not int or not least <= value <= most:
            raise ValueError(
                f"{name} in config.json must be a number from {least} to {most:,}, got {value!r}; download the "
                "checkpoint again"
            )
    try:
        return _read(family, hf)
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(
            f"config.json must have the fields of a {family.model_type}, each of its type, got {type(error).__name__}: "
            f"{error}; download it again"
        ) from error


_SIZES = frozenset(
    {
        *("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok"),
    }
)
_COUNTS = frozenset({"n_shared_experts", "num_nextn_predict_layers", "first_k_dense_replace"})
_LAYERS = frozenset({"num_hidden_layers", "num_nextn_predict_layers", "first_k_dense_replace"})
_LARGEST = 2**31 - 1


def _read(family: Family, hf: Hf) -> Decoder:
    family.scheme(hf)  # raises ValueError for an unknown quantisation
    return family.read(hf)
