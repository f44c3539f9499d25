# Shape of Qwen2.5-7B and its Instruct variant. Source it, then pass "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/qwen2.5.sh"
MODEL_ARGS=(
    "${QWEN2_ARGS[@]}"
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --num-query-groups 4
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
