# Shape of GLM-4.5-Air (106B, 12B of them for a token). Source it, then pass "${MODEL_ARGS[@]}".
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
MODEL_ARGS=(
    --swiglu
    --num-layers 46
    --hidden-size 4096
    --ffn-hidden-size 10944
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --add-qkv-bias
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --rotary-percent 0.5
    --vocab-size 151552
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-layer-freq "[0]*1+[1]*45"
    --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 1408
    --moe-router-topk 8
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 1.0
)
