# Shape of Qwen3-235B-A22B: 128 experts in each of 94 layers, 8 experts per token. Source it, then pass "${MODEL_ARGS[@]}".
# Variants trained for longer contexts have another rotary base: MODEL_ARGS_ROTARY_BASE=10000000.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.sh"
MODEL_ARGS=(
    "${QWEN3_ARGS[@]}"
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --num-query-groups 4
    --kv-channels 128
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-ffn-hidden-size 1536
    --moe-router-topk 8
    --moe-layer-freq "[1]*94"
    --moe-router-score-function softmax
)
