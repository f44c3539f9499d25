# Shape of GLM-4.5 (355B): 160 experts and a shared expert in 89 of 92 layers, 8 experts per token. Source it, then pass
# "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/glm.sh"
MODEL_ARGS=(
    "${GLM_ARGS[@]}"
    --num-layers 92
    --hidden-size 5120
    --ffn-hidden-size 12288
    --num-attention-heads 96
    --num-query-groups 8
    --kv-channels 128
    --rotary-base 1000000
    --vocab-size 151552
    --num-experts 160
    --moe-ffn-hidden-size 1536
    --moe-shared-expert-intermediate-size 1536
    --moe-router-topk 8
    --moe-router-topk-scaling-factor 2.5
    --qk-layernorm
    --moe-layer-freq "[0]*3+[1]*89"
)
