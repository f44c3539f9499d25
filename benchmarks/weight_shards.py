"""What an update costs trainer ranks whose model is tensor parallel: peak host memory per rank, and seconds.

    python benchmarks/weight_shards.py --out benchmarks/results/weight_shards_cpu.json

A dense Qwen3 of 500 million random weights in bfloat16 on two ranks, which talk through gloo. Each rank publishes in
three ways. "gathered, file": rank 0 gathers all tensors and writes them, as adapters and deltas are written. "own
slices, file": each rank writes its own slices. "broadcast": the buckets of --update-weight-transport nccl to one engine
worker, another process that drops them. Peaks are what the kernel says of a process (VmHWM) beyond what it had before
the update; files are in /dev/shm and do not count.
"""

from __future__ import annotations

RANKS, REPEATS = 2, 3
BUCKET_BYTES = 512 * 2**20
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
