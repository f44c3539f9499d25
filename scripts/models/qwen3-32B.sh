# Shape of Qwen3-32B. Source it, then pass "${MODEL_ARGS[@]}".
# Variants trained for longer contexts have another rotary base: MODEL_ARGS_ROTARY_BASE=5000000.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.sh"
MODEL_ARGS=(
    "${QWEN3_ARGS[@]}"
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 25600
    --num-attention-heads 64
    --num-query-groups 8
    --kv-channels 128
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
)
