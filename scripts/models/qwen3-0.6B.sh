# Shape of Qwen3-0.6B. Source it, then pass "${MODEL_ARGS[@]}".
# Variants trained for longer contexts have another rotary base: MODEL_ARGS_ROTARY_BASE=5000000.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.sh"
MODEL_ARGS=(
    "${QWEN3_ARGS[@]}"
    --num-layers 28
    --hidden-size 1024
    --ffn-hidden-size 3072
    --num-attention-heads 16
    --num-query-groups 8
    --kv-channels 128
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
)
