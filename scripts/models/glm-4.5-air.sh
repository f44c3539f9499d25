# Shape of GLM-4.5-Air: 128 experts and a shared expert in 45 of 46 layers, 8 experts per token. Source it, then pass
# "${MODEL_ARGS[@]}".
source "$(dirname "${BASH_SOURCE[0]}")/glm.sh"
MODEL_ARGS=(
    "${GLM_ARGS[@]}"
    --num-layers 46
    --hidden-size 4096
    --ffn-hidden-size 10944
    --num-attention-heads 96
    --num-query-groups 8
    --kv-channels 128
    --rotary-base 1000000
    --vocab-size 151552
    --num-experts 128
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 1408
    --moe-router-topk 8
    --moe-layer-freq "[0]+[1]*45"
)
