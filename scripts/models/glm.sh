# Flags of all GLM-4.5 models. The shape files glm-*.sh source this file.
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
GLM_ARGS=(
    --swiglu
    --group-query-attention
    --add-qkv-bias
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-percent 0.5
    --untie-embeddings-and-output-weights
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias
    --moe-router-topk-scaling-factor 1.0
)
