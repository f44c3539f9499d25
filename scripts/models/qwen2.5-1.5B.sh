# Shape of Qwen2.5-1.5B and its Instruct variant. Source it, then pass "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/qwen2.5.sh"
MODEL_ARGS=(
    "${QWEN2_ARGS[@]}"
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
    --num-query-groups 2
    --vocab-size 151936
)
