"""A row of the table of models (architectures.py), and the differences between other families and Qwen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """One row. `vocab` is (rows of the embedding, id of the first special token). `heads` is (query, key/value).
    `experts` is (routed experts, experts per token, width of an expert) for every sparse layer, with normalised
    weights. `more` are fields of config.json that override the other fields, and `rotary` are more rotary settings."""

    family: str
    hidden: int
    ffn: int
    layers: int
    heads: tuple[int, int]
    head_dim: int
    vocab: tuple[int, int]
    rope_theta: float
    context: int
    tied: bool
    dtype: str
    source: str
    published: tuple[str, str] | None = None
    experts: tuple[int, int, int] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    rotary: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    """Fields of a model with vision tower beside those of its text model."""

    def config_fields(self, **changed: Any) -> dict[str, Any]:
        """The fields of config.json, with `changed` fields of the text model. Three special tokens have consecutive
        ids: end of text, start and end of a turn."""
        text = self._text_fields() | changed
        if not self.vision:
            return text
        shared = {name: text[name] for name in ("tie_word_embeddings", "dtype")}
        return {"text_config": text, **shared, **self.vision}

    def _text_fields(self) -> dict[str, Any]:
        rows, first_special = self.vocab
        keys = EXPERT_KEYS.get(self.family, ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
        routed = dict(zip(keys, self.experts, strict=True)) | {"norm_topk_prob": True} if self.experts else {}
        return {
            "vocab_size": rows,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads[0],
            "num_key_value_heads": self.heads[1],
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                **ROTARY.get(self.family, {}),
                **self.rotary,
            },
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": first_special + 2,
            "pad_token_id": first_special,
            "dtype": self.dtype,
            **routed,
            **self.more,
        }


EXPERT_KEYS = {
    **dict.fromkeys(
        (
            *(
                "glm4_moe",
                "deepseek_v3",
                "deepseek_v32",
                "kimi_k2",
                "kimi_k25",
                "glm4_moe_lite",
                "glm_moe_dsa",
            ),
            "nemotron_h",
        ),
        ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    "gemma4": ("num_experts", "top_k_experts", "moe_intermediate_size"),
    "minimax_m2": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
}
"""Names of the numbers in `Architecture.experts` in a family's config.json, if they differ from Qwen's names."""

ROTARY = {
    **{family: {"partial_rotary_factor": 0.5} for family in ("glm4", "glm4_moe", "minimax_m2")},
    **{f: {"partial_rotary_factor": 0.25} for f in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}
"""More rotary fields of families that rotate half or a quarter of a head."""

NOT_IN_TRANSFORMERS = {
    "mimo": ("qwen2", "MiMoForCausalLM"),
    "kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
}
"""Family -> the family in transformers with the same layers, and the name of its model class in config.json."""


STORED_AS = {
    "minimax_m2": {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
}
"""Family -> the parts of tensor names that its checkpoints spell differently than transformers."""


STACKED = ("gpt_oss",)
"""Families whose checkpoints have one tensor for all experts of a layer, as transformers has."""
