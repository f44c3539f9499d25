# What all Qwen3 have in common; sourced by the files of their shapes, qwen3-*.sh.
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
