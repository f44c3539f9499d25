# Shape of the model that scripts/make_tiny_model.py writes. Source it, then pass "${MODEL_ARGS[@]}".
# The shape itself comes from config.json of --hf-checkpoint; these flags are checked against it.
MODEL_ARGS=(
    --swiglu
    --num-layers 2
    --hidden-size 256
    --ffn-hidden-size 512
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 2
    --kv-channels 32
    --qk-layernorm
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base 10000
    --vocab-size 262
)
