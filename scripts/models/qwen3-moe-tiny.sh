# Shape of the qwen3-moe-tiny that scripts/make_model.py writes. Source it, then pass "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.sh"
MODEL_ARGS=(
    "${QWEN3_ARGS[@]}"
    --num-layers 2
    --hidden-size 256
    --ffn-hidden-size 512
    --num-attention-heads 8
    --num-query-groups 2
    --kv-channels 32
    --rotary-base 10000
    --vocab-size 262
    --num-experts 8
    --moe-ffn-hidden-size 128
    --moe-router-topk 2
    --moe-layer-freq "[1,1]"
)
