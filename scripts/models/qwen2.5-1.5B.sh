# Shape of Qwen2.5-1.5B and its Instruct variant. Source it, then pass "${MODEL_ARGS[@]}".
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 1536
    --ffn-hidden-size 8960
    --num-attention-heads 12
    --group-query-attention
    --num-query-groups 2
    --use-rotary-position-embeddings
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --rotary-base 1000000
    --vocab-size 151936
)
