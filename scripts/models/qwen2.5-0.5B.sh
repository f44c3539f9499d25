# Shape of Qwen2.5-0.5B and its Instruct variant. Source it, then pass "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/qwen2.5.sh"
MODEL_ARGS=(
    "${QWEN2_ARGS[@]}"
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --num-query-groups 2
    --vocab-size 151936
)
