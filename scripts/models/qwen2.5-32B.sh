# Shape of Qwen2.5-32B and its Instruct variant. Source it, then pass "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/qwen2.5.sh"
MODEL_ARGS=(
    "${QWEN2_ARGS[@]}"
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --num-query-groups 8
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
