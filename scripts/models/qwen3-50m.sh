# Shape of the qwen3-50m that scripts/make_model.py writes. Source it, then pass "${MODEL_ARGS[@]}".
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
MODEL_ARGS=(
    --swiglu
    --num-layers 12
    --hidden-size 512
    --ffn-hidden-size 2048
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
    --kv-channels 64
    --qk-layernorm
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base 10000
    --vocab-size 512
)
