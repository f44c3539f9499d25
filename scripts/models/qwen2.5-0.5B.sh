# Shape of Qwen2.5-0.5B and its Instruct variant. Source it, then pass "${MODEL_ARGS[@]}".
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
MODEL_ARGS=(
    --swiglu
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --vocab-size 151936
)
