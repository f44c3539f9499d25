"""Lists the models of scripts/architectures.py that tests build, by the way they check them.

It also has config.json of published models with latent attention.
"""

from __future__ import annotations

from typing import Any

from family_cases import MSCALE

EXACT = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "glm-4-9b": 9_400_279_040,
    "gemma-3-1b": 999_885_952,
    "gemma-2-2b": 2_614_341_888,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-4b-instruct-2507": 4_022_468_096,
    "smollm2-135m": 134_515_008,
    "olmo-3-7b": 7_298_011_136,
    "gemma-4-31b": 30_697_345_280,
}
"""Model -> number of elements in all tensors of the published checkpoint; a tied head counts once. The last four were
computed with this project."""
SHALLOW = (
    "llama-3.2-3b",
    "glm-4-9b",
    "mimo-7b",
    "minimax-m2",
    "gemma-3-1b",
    "gemma-2-2b",
    "glm-4-32b",
    "olmo-3-7b",
)
LATENT = (
    "deepseek-v3",
    "deepseek-v3.2",
    "moonlight-16b-a3b",
    "kimi-k2",
    "kimi-k2-thinking",
    "glm-4.7-flash",
    "glm-5",
)
SPARSE = (
    *("qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-moe-tiny", "glm-4.5-air", "glm-4.5-355b", "glm-moe-tiny"),
    *LATENT,
    "qwen1.5-moe-a2.7b",
    "deepseek-tiny",
    "glm-5-tiny",
)
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32}
    | {"beta_slow": 1, **MSCALE},
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
}
"""config.json of deepseek-ai/DeepSeek-R1."""
INDEX = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
V32 = DEEPSEEK | INDEX | {"model_type": "deepseek_v32", "num_nextn_predict_layers": 0}
GLM5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 154880,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
"""Fields of the config.json of zai-org/GLM-5."""
