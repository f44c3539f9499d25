"""Two models of the records: Qwen3-4B, and Qwen3-30B-A3B with some of its layers."""

from __future__ import annotations

from vime.plan.search.step_time import Model

DENSE = Model(
    {
        **{"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        **{"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"},
        **{"max_position_embeddings": 40960, "attention_bias": False},
    }
)


def experts(layers: int) -> Model:
    return Model(
        {
            **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144},
            **{
                "num_hidden_layers": layers,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
            },
            **{"vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
            **{
                "max_position_embeddings": 40960,
                "hidden_act": "silu",
                "attention_bias": False,
                "num_experts": 128,
            },
            **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
            **{"norm_topk_prob": True, "mlp_only_layers": []},
        }
    )
