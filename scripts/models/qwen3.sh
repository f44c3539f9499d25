# Flags of all Qwen3 models. The shape files qwen3-*.sh source this file.
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
QWEN3_ARGS=(
    --swiglu
    --group-query-attention
    --qk-layernorm
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
)
