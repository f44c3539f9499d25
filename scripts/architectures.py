"""Shapes of the models that scripts/make_model.py can make: one row per model, with the source of its numbers.

Published models have the shape fields of their config.json. `published` has the parameter counts of the model card,
with and without embeddings, in billions and with the card's digits. The other models are our own, for learning curves
and tests. Their vocabulary is bytes, so most parameters are in the layers.
"""

from __future__ import annotations

from typing import Any

from architecture import Architecture
from architecture_fields import (
    GLM,
    GLM_LARGE,
    GPT_OSS_ROPE,
    HYBRID,
    MINIMAX,
    QWEN3_NEXT,
    deepseek_yarn,
    delta,
    gemma2,
    gemma3,
    gemma4,
    indexer,
    latent,
    llama3,
    mamba,
    olmo3,
)

LLAMA_VOCAB = (128256, 128000)
GEMMA3_VOCAB = (262144, 262138)
GEMMA2_VOCAB = (256000, 255994)
GPT_OSS_VOCAB = (201088, 199999)
GLM_VOCAB = (151552, 151329)
QWEN_VOCAB = (151936, 151643)  # all Qwen2, 2.5 and 3: 151643 byte pairs, special tokens, unused rows
QWEN_LARGE_VOCAB = (152064, 151643)  # Qwen2.5 from 7B on has more unused rows
BYTES_VOCAB = (512, 256)
HUB = "config.json and model card of Qwen/{} on the Hugging Face hub"


def qwen3_5(name: str, sizes: tuple[Any, ...], tied: bool, values: int, **experts: Any) -> Architecture:
    """A text model of Qwen3.5: `sizes` are hidden, ffn, layers and heads. Its vision tower and its prediction layer are
    left out."""
    family = "qwen3_5_moe_text" if experts else "qwen3_5_text"
    shared = {"shared_expert_intermediate_size": 512} if experts else {}
    return Architecture(
        *(family, *sizes, 256, (248320, 248044), 1e7, 262144, tied),
        *("bfloat16", f"slime's MODEL_ARGS of {name}; heads of values as wide as the attention"),
        more=delta(values, **shared),
        **experts,
    )


def tiny(family: str, dtype: str = "float32", **more: Any) -> Architecture:
    """A model of `family` for tests, with the sizes of qwen3-tiny."""
    sizes = (family, 256, 512, 2, (8, 2), 32, (262, 256), 1e4, 1024, False)
    return Architecture(*sizes, dtype, f"our own: {family} in small, for tests", **more)


# family, hidden, ffn, layers, (q, kv) heads, head, vocabulary, rope theta, context, tied, dtype, source, (all, body)
ARCHITECTURES = {
    "qwen3-0.6b": Architecture(
        *("qwen3", 1024, 3072, 28, (16, 8), 128, QWEN_VOCAB, 1e6, 40960, True),
        *("bfloat16", HUB.format("Qwen3-0.6B"), ("0.6", "0.44")),
    ),
    "qwen3-1.7b": Architecture(
        *("qwen3", 2048, 6144, 28, (16, 8), 128, QWEN_VOCAB, 1e6, 40960, True),
        *("bfloat16", HUB.format("Qwen3-1.7B"), ("1.7", "1.4")),
    ),
    "qwen3-4b": Architecture(
        *("qwen3", 2560, 9728, 36, (32, 8), 128, QWEN_VOCAB, 1e6, 40960, True),
        *("bfloat16", HUB.format("Qwen3-4B"), ("4.0", "3.6")),
    ),
    "qwen3-8b": Architecture(
        *("qwen3", 4096, 12288, 36, (32, 8), 128, QWEN_VOCAB, 1e6, 40960, False),
        *("bfloat16", HUB.format("Qwen3-8B"), ("8.2", "6.95")),
    ),
    "qwen3-14b": Architecture(
        *("qwen3", 5120, 17408, 40, (40, 8), 128, QWEN_VOCAB, 1e6, 40960, False),
        *("bfloat16", HUB.format("Qwen3-14B"), ("14.8", "13.2")),
    ),
    "qwen3-32b": Architecture(
        *("qwen3", 5120, 25600, 64, (64, 8), 128, QWEN_VOCAB, 1e6, 40960, False),
        *("bfloat16", HUB.format("Qwen3-32B"), ("32.8", "31.2")),
    ),
    "qwen3-30b-a3b": Architecture(
        *("qwen3_moe", 2048, 6144, 48, (32, 4), 128, QWEN_VOCAB, 1e6, 40960, False),
        *("bfloat16", HUB.format("Qwen3-30B-A3B"), ("30.5", "29.9"), (128, 8, 768)),
    ),
    "qwen3-235b-a22b": Architecture(
        *("qwen3_moe", 4096, 12288, 94, (64, 4), 128, QWEN_VOCAB, 1e6, 40960, False),
        *("bfloat16", HUB.format("Qwen3-235B-A22B"), ("235", "234"), (128, 8, 1536)),
    ),
    "qwen2.5-0.5b": Architecture(
        *("qwen2", 896, 4864, 24, (14, 2), 64, QWEN_VOCAB, 1e6, 32768, True),
        *("bfloat16", HUB.format("Qwen2.5-0.5B-Instruct"), ("0.49", "0.36")),
    ),
    "qwen2.5-1.5b": Architecture(
        *("qwen2", 1536, 8960, 28, (12, 2), 128, QWEN_VOCAB, 1e6, 32768, True),
        *("bfloat16", HUB.format("Qwen2.5-1.5B-Instruct"), ("1.54", "1.31")),
    ),
    "qwen2.5-7b": Architecture(
        *("qwen2", 3584, 18944, 28, (28, 4), 128, QWEN_LARGE_VOCAB, 1e6, 32768, False),
        *("bfloat16", HUB.format("Qwen2.5-7B-Instruct"), ("7.62", "6.53")),
    ),
    # The cards give 7.61 for 7B, and 32.5 and 31.0 for 32B. The numbers here are counted from the checkpoints' tensors.
    "qwen2.5-32b": Architecture(
        *("qwen2", 5120, 27648, 64, (40, 8), 128, QWEN_LARGE_VOCAB, 1e6, 32768, False),
        *("bfloat16", HUB.format("Qwen2.5-32B-Instruct"), ("32.8", "31.2")),
    ),
    "qwen2.5-3b": Architecture(
        *("qwen2", 2048, 11008, 36, (16, 2), 128, QWEN_VOCAB, 1e6, 32768, True),
        *("bfloat16", "slime's MODEL_ARGS of qwen2.5-3B"),
    ),
    "qwen3-4b-instruct-2507": Architecture(
        *("qwen3", 2560, 9728, 36, (32, 8), 128, QWEN_VOCAB, 5e6, 262144, True),
        *("bfloat16", "slime's MODEL_ARGS of qwen3-4B-Instruct-2507"),
    ),
    "qwen1.5-moe-a2.7b": Architecture(
        *("qwen2_moe", 2048, 5632, 24, (16, 16), 128, QWEN_VOCAB, 1e6, 8192, False),
        *(
            "bfloat16",
            "config.json of Qwen/Qwen1.5-MoE-A2.7B-Chat on the Hugging Face hub",
            None,
            (60, 4, 1408),
        ),
        {"shared_expert_intermediate_size": 5632, "norm_topk_prob": False},
    ),
    "qwen3-next-80b-a3b": Architecture(
        *("qwen3_next", 2048, 5120, 48, (16, 2), 256, QWEN_VOCAB, 1e7, 262144, False),
        *("bfloat16", "slime's MODEL_ARGS of qwen3-next-80B-A3B, without its layer of prediction", None),
        *((512, 10, 512), delta(32, shared_expert_intermediate_size=512)),
    ),
    "qwen3.5-0.8b": qwen3_5("Qwen3.5-0.8B", (1024, 3584, 24, (8, 2)), tied=True, values=16),
    "qwen3.5-4b": qwen3_5("Qwen3.5-4B", (2560, 9216, 32, (16, 4)), tied=True, values=32),
    "qwen3.5-9b": qwen3_5("Qwen3.5-9B", (4096, 12288, 32, (16, 4)), tied=False, values=32),
    "qwen3.5-27b": qwen3_5("Qwen3.5-27B", (5120, 17408, 64, (24, 4)), tied=False, values=48),
    "qwen3.5-35b-a3b": qwen3_5(
        "Qwen3.5-35B-A3B", (2048, 512, 40, (16, 2)), tied=False, values=32, experts=(256, 8, 512)
    ),
    "nemotron-3-nano-30b-a3b": Architecture(
        *("nemotron_h", 2688, 1856, 52, (32, 2), 128, (131072, 131000), 1e4, 262144, False),
        *("bfloat16", "config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", None, (128, 6, 1856)),
        mamba(
            *("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 64, 64, 128, 8),
            moe_shared_expert_intermediate_size=3712,
            routed_scaling_factor=2.5,
        ),
    ),
    "llama-3.1-8b": Architecture(
        *("llama", 4096, 14336, 32, (32, 8), 128, LLAMA_VOCAB, 5e5, 131072, False),
        *("bfloat16", "config.json of meta-llama/Llama-3.1-8B-Instruct", None, None),
        *({"rms_norm_eps": 1e-5}, llama3(8.0)),
    ),
    "llama-3.2-3b": Architecture(
        *("llama", 3072, 8192, 28, (24, 8), 128, LLAMA_VOCAB, 5e5, 131072, True),
        *("bfloat16", "config.json of meta-llama/Llama-3.2-3B-Instruct", None, None),
        *({"rms_norm_eps": 1e-5}, llama3(32.0)),
    ),
    "smollm2-135m": Architecture(
        *("llama", 576, 1536, 30, (9, 3), 64, (49152, 49146), 1e5, 8192, True),
        *(
            "bfloat16",
            "config.json of HuggingFaceTB/SmolLM2-135M-Instruct",
            None,
            None,
            {"rms_norm_eps": 1e-5},
        ),
    ),
    "mistral-7b": Architecture(
        *("mistral", 4096, 14336, 32, (32, 8), 128, (32768, 32762), 1e6, 32768, False),
        *("bfloat16", "config.json of mistralai/Mistral-7B-Instruct-v0.3", None, None),
        {"rms_norm_eps": 1e-5, "sliding_window": None},
    ),
    "glm-4-9b": Architecture(
        *("glm4", 4096, 13696, 40, (32, 2), 128, GLM_VOCAB, 1e4, 32768, False),
        *("bfloat16", "config.json of zai-org/GLM-4-9B-0414", None, None),
        {"rms_norm_eps": 1e-5, "attention_bias": True},
    ),
    "glm-4-32b": Architecture(
        *("glm4", 6144, 23040, 64, (48, 8), 128, GLM_VOCAB, 1e4, 32768, False),
        *("bfloat16", "MODEL_ARGS of slime's glm4-32B", None, None),
        {"rms_norm_eps": 1e-5, "attention_bias": True},
    ),
    "mimo-7b": Architecture(
        *("mimo", 4096, 11008, 36, (32, 8), 128, (151680, 151643), 6.4e5, 32768, False),
        *("bfloat16", "config.json of XiaomiMiMo/MiMo-7B-RL, without its layer of prediction", None, None),
        {"rms_norm_eps": 1e-5},
    ),
    "olmo-3-7b": Architecture(
        *("olmo3", 4096, 11008, 32, (32, 32), 128, (100278, 100257), 5e5, 65536, False),
        *("bfloat16", "public descriptions of allenai/Olmo-3-7B-Instruct, not its config.json", None, None),
        olmo3(4096, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}),
    ),
    "minimax-m2": Architecture(
        *("minimax_m2", 3072, 1536, 62, (48, 8), 128, (200064, 200019), 5e6, 196608, False),
        *("bfloat16", "config.json of MiniMaxAI/MiniMax-M2, without its modules of prediction", None),
        *((256, 8, 1536), MINIMAX | {"rotary_dim": 64}),
    ),
    "gemma-3-1b": Architecture(
        *("gemma3_text", 1152, 6912, 26, (4, 1), 256, GEMMA3_VOCAB, 1e6, 32768, True),
        *("bfloat16", "config.json of google/gemma-3-1b-it", None, None),
        gemma3(256, 512),
    ),
    "gemma-4-31b": Architecture(
        *("gemma4_text", 5376, 21504, 60, (32, 16), 256, GEMMA3_VOCAB, 1e6, 262144, True),
        *(
            "bfloat16",
            "public descriptions of google/gemma-4-31B-it, not its config.json; without its vision tower",
            None,
            None,
        ),
        gemma4(1024, (4, 512)),
    ),
    "gemma-2-2b": Architecture(
        *("gemma2", 2304, 9216, 26, (8, 4), 256, GEMMA2_VOCAB, 1e4, 8192, True),
        *("bfloat16", "config.json of google/gemma-2-2b-it", None, None),
        gemma2(256),
    ),
    "gpt-oss-20b": Architecture(
        *("gpt_oss", 2880, 2880, 24, (64, 8), 64, GPT_OSS_VOCAB, 1.5e5, 131072, False),
        *("bfloat16", "config.json of openai/gpt-oss-20b, in bfloat16", None, (32, 4, 2880)),
        *({"rms_norm_eps": 1e-5, "sliding_window": 128}, GPT_OSS_ROPE),
    ),
    "gpt-oss-120b": Architecture(
        *("gpt_oss", 2880, 2880, 36, (64, 8), 64, GPT_OSS_VOCAB, 1.5e5, 131072, False),
        *("bfloat16", "config.json of openai/gpt-oss-120b, in bfloat16", None, (128, 4, 2880)),
        *({"rms_norm_eps": 1e-5, "sliding_window": 128}, GPT_OSS_ROPE),
    ),
    "qwen3-50m": Architecture(
        *("qwen3", 512, 2048, 12, (8, 4), 64, BYTES_VOCAB, 1e4, 4096, True),
        *("bfloat16", "our own: a model that learns arithmetic within minutes on a GPU"),
    ),
    "qwen3-tiny": Architecture(
        *("qwen3", 256, 512, 2, (8, 2), 32, (262, 256), 1e4, 1024, True),
        *("float32", "our own: the model of scripts/run-tiny-grpo.sh, trained on two CPU cores"),
    ),
    "glm-4.5-air": Architecture(
        *("glm4_moe", 4096, 10944, 46, (96, 8), 128, (151552, 151329), 1e6, 131072, False, "bfloat16"),
        *("config.json of zai-org/GLM-4.5-Air on the Hugging Face hub", None, (128, 8, 1408), GLM),
    ),
    "glm-4.5-355b": Architecture(
        *("glm4_moe", 5120, 12288, 92, (96, 8), 128, (151552, 151329), 1e6, 131072, False, "bfloat16"),
        *("config.json of zai-org/GLM-4.5 on the Hugging Face hub", None, (160, 8, 1536), GLM_LARGE),
    ),
    "glm-moe-tiny": Architecture(
        *("glm4_moe", 256, 512, 2, (8, 2), 32, (262, 256), 1e4, 1024, False, "float32"),
        *("our own: GLM-4.5-Air in small, for tests", None, (8, 2, 128), GLM),
    ),
    "deepseek-v3": Architecture(
        *("deepseek_v3", 7168, 18432, 61, (128, 128), 64, (129280, 128000), 1e4, 163840, False, "bfloat16"),
        *("config.json of deepseek-ai/DeepSeek-V3, without its layer of prediction", None, (256, 8, 2048)),
        latent(1536, (128, 128), 3, 1, 2.5, n_group=8, topk_group=4),
        deepseek_yarn(40.0),
    ),
    "deepseek-v3.2": Architecture(
        *("deepseek_v32", 7168, 18432, 61, (128, 128), 64, (129280, 128000), 1e4, 163840, False, "bfloat16"),
        *(
            "public descriptions of deepseek-ai/DeepSeek-V3.2, not its config.json; without its layer of prediction",
            None,
            (256, 8, 2048),
        ),
        latent(1536, (128, 128), 3, 1, 2.5, n_group=8, topk_group=4, **indexer(64)),
        deepseek_yarn(40.0),
    ),
    "glm-5": Architecture(
        *("glm_moe_dsa", 6144, 12288, 78, (64, 64), 64, (154880, 154820), 1e6, 202752, False, "bfloat16"),
        *(
            "slime's script for GLM-5, not its config.json; without its layer of prediction",
            None,
            (256, 8, 2048),
        ),
        latent(2048, (192, 256), 3, 1, 2.5, rms_norm_eps=1e-5, indexer_rope_interleave=True, **indexer(32)),
    ),
    "moonlight-16b-a3b": Architecture(
        *("deepseek_v3", 2048, 11264, 27, (16, 16), 64, (163840, 163584), 5e4, 8192, False, "bfloat16"),
        *("config.json of moonshotai/Moonlight-16B-A3B-Instruct", None, (64, 6, 1408)),
        latent(None, (128, 128), 1, 2, 2.446, rms_norm_eps=1e-5),
    ),
    "kimi-k2": Architecture(
        *("kimi_k2", 7168, 18432, 61, (64, 64), 64, (163840, 163584), 5e4, 131072, False, "bfloat16"),
        *("config.json of moonshotai/Kimi-K2-Instruct", None, (384, 8, 2048)),
        latent(1536, (128, 128), 1, 1, 2.827),
        deepseek_yarn(32.0),
    ),
    "kimi-k2-thinking": Architecture(
        *("kimi_k2", 7168, 18432, 61, (64, 64), 64, (163840, 163584), 5e4, 262144, False, "bfloat16"),
        *(
            "slime's MODEL_ARGS of kimi-k2-thinking, in bfloat16; the rest as K2",
            None,
            (384, 8, 2048),
        ),
        latent(1536, (128, 128), 1, 1, 2.827, rms_norm_eps=1e-5),
        deepseek_yarn(64.0),
    ),
    "glm-4.7-flash": Architecture(
        *("glm4_moe_lite", 2048, 10240, 47, (20, 20), 64, (154880, 154820), 1e6, 202752, False, "bfloat16"),
        *("config.json of zai-org/GLM-4.7-Flash, without its layer of prediction", None, (64, 4, 1536)),
        latent(768, (192, 256), 1, 1, 1.8, rms_norm_eps=1e-5),
    ),
    "deepseek-tiny": Architecture(
        *("deepseek_v3", 256, 512, 2, (8, 8), 64, (262, 256), 1e4, 1024, False, "float32"),
        *("our own: DeepSeek-V3 in small, for tests; vLLM's CPU kernel needs its latent sizes", None),
        *((8, 2, 128), latent(128, (32, 32), 1, 1, 2.5, n_group=2, topk_group=1)),
    ),
    "glm-5-tiny": Architecture(
        *("glm_moe_dsa", 256, 512, 2, (8, 8), 64, (262, 256), 1e4, 1024, False, "float32"),
        *("our own: GLM-5 in small, for tests; vLLM's CPU kernel needs its latent sizes", None),
        *((8, 2, 128), latent(128, (32, 32), 1, 1, 2.5, indexer_rope_interleave=True, **indexer(8, 1024))),
    ),
    "llama-tiny": tiny("llama", rotary=llama3(8.0)),
    "mistral-tiny": tiny("mistral", more={"sliding_window": 12}),
    "glm4-tiny": tiny("glm4", more={"attention_bias": True}),
    "minimax-m2-tiny": tiny("minimax_m2", experts=(8, 2, 128), more=MINIMAX | {"rotary_dim": 16}),
    "mimo-tiny": tiny("mimo"),
    "olmo3-tiny": tiny("olmo3", more=olmo3(12, layer_types=["sliding_attention", "full_attention"])),
    # vLLM's kernels of gated delta nets for CPUs are in bfloat16 only
    "qwen3-next-tiny": tiny("qwen3_next", "bfloat16", experts=(8, 2, 128), more=QWEN3_NEXT),
    "qwen3-5-tiny": tiny("qwen3_5_text", "bfloat16", more=HYBRID),
    "nemotron-h-tiny": tiny("nemotron_h", more=mamba("M-*M", 8, 64, 32, 2)),
    "qwen2-moe-tiny": tiny("qwen2_moe", experts=(8, 2, 128), more={"shared_expert_intermediate_size": 128}),
    "gemma3-tiny": tiny(
        "gemma3_text", more=gemma3(24, 12, layer_types=["sliding_attention", "full_attention"])
    ),
    "gemma2-tiny": tiny("gemma2", more=gemma2(24, 12) | {"tie_word_embeddings": True}),
    "gpt-oss-tiny": tiny(
        "gpt_oss",
        experts=(8, 2, 128),
        more={"rms_norm_eps": 1e-5, "sliding_window": 12},
        rotary=GPT_OSS_ROPE | {"original_max_position_embeddings": 256, "factor": 4.0},
    ),
    "seed-oss-tiny": tiny("seed_oss", more={"attention_bias": True, "attention_out_bias": False}),
    "qwen3-moe-tiny": Architecture(
        *("qwen3_moe", 256, 512, 2, (8, 2), 32, (262, 256), 1e4, 1024, True),
        *("float32", "our own: qwen3-tiny with eight experts a layer, for tests", None, (8, 2, 128)),
    ),
    "qwen3-moe-blocks-tiny": Architecture(
        *("qwen3_moe", 256, 512, 2, (4, 2), 64, (262, 256), 1e4, 1024, False, "bfloat16"),
        *("our own: qwen3-moe-tiny in whole blocks of 128 x 128, for fp8", None, (8, 2, 128)),
    ),
}
