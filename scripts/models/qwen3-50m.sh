# Shape of the qwen3-50m that scripts/make_model.py writes. Source it, then pass "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.sh"
MODEL_ARGS=(
    "${QWEN3_ARGS[@]}"
    --num-layers 12
    --hidden-size 512
    --ffn-hidden-size 2048
    --num-attention-heads 8
    --num-query-groups 4
    --kv-channels 64
    --rotary-base 10000
    --vocab-size 512
)
