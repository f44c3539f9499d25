# Shape of Qwen3-30B-A3B: 128 experts in each of 48 layers, 8 experts per token. Source it, then pass "${MODEL_ARGS[@]}".
# Variants trained for longer contexts have another rotary base: MODEL_ARGS_ROTARY_BASE=10000000.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.sh"
MODEL_ARGS=(
    "${QWEN3_ARGS[@]}"
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --num-query-groups 4
    --kv-channels 128
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-layer-freq "[1]*48"
    --moe-router-score-function softmax
)
