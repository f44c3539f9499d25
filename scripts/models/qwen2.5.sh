# Flags of all Qwen2.5 models. The shape files qwen2.5-*.sh source this file.
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
QWEN2_ARGS=(
    --swiglu
    --group-query-attention
    --add-qkv-bias
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base 1000000
)
