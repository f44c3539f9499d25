"""Multi-head latent attention (DeepSeek-V2, 2405.04434, part 2.1): its sizes, its rows and its reader of config.json.

One latent vector per token produces the keys and values for all heads. Queries may come from a latent vector too. A
part of every query and key has no position. The other part is rotated, and all heads share that part of the key.

In sparse latent attention (DSA: DeepSeek-V3.2, 2512.02556, part 2.1), each query sees the tokens that a lightning
indexer selects for it. In some layers of newer models, it sees the tokens that an earlier layer selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime.models.decoder import Attention, Decoder, Hf, Layer
from slime.models.layouts import Direct, Row
from slime.models.reading import check_experts, need, only, sigmoid_experts, sizes
from slime.models.rope import Rope, mscale, read_rope
from slime.models.rows import ENDS, EXPERTS, HF, MG, MLP, NORMS, OUTPUT_BIAS, ROUTER_BIAS, SHARED_EXPERT

INDEXER = ".self_attention.indexer."
"""Part of the names of an indexer's parameters in Megatron. No run trains them."""
MOST_SCORES = 2**26
"""Most scores that an indexer, or the attention to its selection, computes at a time in a trainer, over all heads."""


@dataclass(frozen=True)
class Indexer:
    """The sizes of a lightning indexer (DeepSeek-V3.2, 2512.02556, part 2.1), which selects the tokens that a query
    sees.

    The score of a key for a query is `sum(w * relu(q @ k) for each head)`. All heads share the key. A query sees the
    `topk` keys with the highest scores, which is no function with a gradient.
    """

    heads: int
    size: int
    """Number of dimensions of a head. The number of rotated (first) dimensions is the same as in the attention."""
    topk: int
    rope: int = 0
    """Index of the rotary embedding in `Decoder.ropes`."""
    source: int | None = None
    """Number of the layer whose indexer selects the tokens, if layers share a selection. None means the layer's own
    indexer, whose selection no other layer uses."""
    shared: bool = False
    """The layer has no indexer, and `source` is an earlier layer."""


@dataclass(frozen=True)
class Latent(Attention):
    """The sizes of latent attention."""

    q_rank: int | None = None
    """Width of the latent vector of queries. None means that queries come from the hidden states."""
    kv_rank: int = 0
    """Width of the latent vector of keys and values."""
    plain: int = 0
    """Dimensions of a head's query and key without position."""
    turned: int = 0
    """Rotated dimensions of a head's query and key."""
    value: int = 0
    """Dimensions of a head's value."""
    scale: float = 0.0
    """Factor of the scores before the softmax."""
    bias: bool = False
    """The projections from hidden states to latent vectors and the output projection have biases."""
    index: Indexer | None = None
    """Selects the tokens that a query sees. None means that a query sees all previous tokens."""

    @property
    def key(self) -> int:
        """Returns the dimensions of a query and of a key."""
        return self.plain + self.turned


def latent_attention(hf: Hf, rope: Rope) -> Latent:
    """Returns the attention of a layer."""
    hidden, heads, kv_rank = (hf[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    q_rank = hf.get("q_lora_rank")
    plain, turned, value = (hf[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    key, widest = plain + turned, max(plain + turned, value)
    down = hidden * (kv_rank + turned) + hidden * (q_rank or 0)
    # the attention's output is copied if its heads were padded to the size of the keys
    copied = heads * value if value < widest else 0
    return Latent(
        params=(q_rank or hidden) * heads * key + kv_rank * heads * (plain + value) + heads * value * hidden,
        whole=down,
        # the input after its norm, both latent vectors, queries, keys, and padded values and outputs
        kept=hidden + (q_rank or 0) + kv_rank + turned + 2 * heads * (key + widest) + copied,
        context=heads * (key + widest),
        cache=kv_rank + turned,
        cache_whole=True,
        pair_flops=2 * heads * (key + value),
        q_rank=q_rank,
        kv_rank=kv_rank,
        plain=plain,
        turned=turned,
        value=value,
        scale=softmax_scale(rope, key),
        bias=bool(hf.get("attention_bias", False)),
    )


def softmax_scale(rope: Rope, size: int) -> float:
    """Returns `size ** -0.5`, multiplied by the square of YaRN's scale for `mscale_all_dim`, if config.json has it."""
    weight = rope.settings.get("mscale_all_dim")
    factor = mscale(rope.settings["factor"], weight) if weight else 1.0
    return float(size**-0.5 * factor * factor)


def read_latent(hf: Hf, sparse: Sequence[bool]) -> Decoder:
    """Returns the decoder of a family with latent attention and sigmoid experts. `sparse` marks the layers with
    experts."""
    parsed = sizes(hf)
    need(hf, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    only(
        hf,
        hidden_act="silu",
        mlp_bias=False,
        rope_interleave=True,
        num_key_value_heads=hf["num_attention_heads"],
    )
    only(hf, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    rope = read_rope(hf, hf["qk_rope_head_dim"], whole=True, interleaved=True)
    attention = latent_attention(hf, rope)
    return Decoder(
        **parsed,
        groups=hf["num_attention_heads"],
        head_dim=attention.key,
        layers=tuple(Layer(attention, kind="latent", sparse=has) for has in sparse),
        ropes=(rope,),
        experts=check_experts(hf, sigmoid_experts),
        qkv_bias=attention.bias,
        output_bias=attention.bias,
    )


_MG, _HF = MG + "self_attention.", HF + "self_attn."

LATENT = (
    Row(_MG + "linear_q_proj.weight", (_HF + "q_proj.weight",), Direct(axis=0)),
    Row(_MG + "linear_q_down_proj.weight", (_HF + "q_a_proj.weight",)),
    Row(_MG + "linear_q_down_proj.bias", (_HF + "q_a_proj.bias",)),
    Row(_MG + "q_layernorm.weight", (_HF + "q_a_layernorm.weight",)),
    Row(_MG + "linear_q_up_proj.weight", (_HF + "q_b_proj.weight",), Direct(axis=0)),
    Row(_MG + "linear_kv_down_proj.weight", (_HF + "kv_a_proj_with_mqa.weight",)),
    Row(_MG + "linear_kv_down_proj.bias", (_HF + "kv_a_proj_with_mqa.bias",)),
    Row(_MG + "kv_layernorm.weight", (_HF + "kv_a_layernorm.weight",)),
    Row(_MG + "linear_kv_up_proj.weight", (_HF + "kv_b_proj.weight",), Direct(axis=0)),
    Row(_MG + "linear_proj.weight", (_HF + "o_proj.weight",), Direct(axis=1)),
    OUTPUT_BIAS,
)
"""The Megatron names are those of Megatron's own latent attention."""

LAYER = NORMS + LATENT + MLP + EXPERTS + (ROUTER_BIAS, *SHARED_EXPERT)
LATENT_EXPERTS = ENDS + LAYER
"""The whole table of a decoder with latent attention, sigmoid experts and a shared expert."""

_NAMES = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
_MG_INDEXER, _HF_INDEXER = MG.removesuffix(".") + INDEXER, HF + "self_attn.indexer."
SPARSE_LAYER = (*LAYER, *(Row(_MG_INDEXER + name, (_HF_INDEXER + name,)) for name in _NAMES))
"""The rows of a layer with its own indexer."""
SHARED = tuple(_HF_INDEXER + name for name in (*_NAMES, "wq_b.weight_scale_inv", "wk.weight_scale_inv"))
"""Names in files that a layer without an indexer does not use. Published files may have them."""
_KEY_SCALE_BYTES = 4


def read_sparse(hf: Hf, sparse: Sequence[bool], *, interleaved: bool, shared: Sequence[bool]) -> Decoder:
    """Returns the decoder of a family with sparse latent attention. `sparse` marks the layers with experts, and
    `shared` the layers that see the tokens which an earlier layer selected. `interleaved` means that the indexer
    rotates neighbouring dimensions, as the attention does. Each layer of multi-token prediction has its own indexer.
    Raises ValueError for a missing or wrong setting."""
    need(hf, "q_lora_rank", "index_topk", "index_head_dim", "index_n_heads")
    decoder = read_latent(hf, sparse)
    if shared[0]:
        raise ValueError(
            "indexer_types in config.json must be full for the first layer, got shared; the checkpoint is incomplete"
        )
    (rope,) = decoder.ropes
    ropes = (rope,) if interleaved else (rope, replace(rope, interleaved=False))
    plain = Indexer(hf["index_n_heads"], hf["index_head_dim"], hf["index_topk"], rope=len(ropes) - 1)
    if plain.size < rope.size or plain.topk < 1:
        raise ValueError(
            f"index_head_dim in config.json must be at least {rope.size}, the rotated part, and index_topk at least 1, "
            f"got {plain.size} and {plain.topk}; the checkpoint is incomplete"
        )
    layers, source = [], 0
    for number, layer in enumerate(decoder.layers):
        source = source if shared[number] else number
        index = replace(plain, source=source, shared=shared[number]) if any(shared) else plain
        layers.append(with_indexer(layer, index, decoder.hidden))
    predicted = with_indexer(decoder.layers[-1], plain, decoder.hidden)
    predictions = (predicted,) * (hf.get("num_nextn_predict_layers") or 0)
    return replace(decoder, layers=tuple(layers), ropes=ropes, predictions=predictions)


def with_indexer(layer: Layer, index: Indexer, hidden: int) -> Layer:
    """Returns the dense layer with an indexer. An engine keeps the indexer's key of a token in fp8, with one scale. The
    backward needs the positions of the selected tokens, in int32."""
    attention = layer.attention
    assert isinstance(attention, Latent) and attention.q_rank is not None
    width = index.heads * index.size
    own = attention.q_rank * width + hidden * (index.size + index.heads)
    key = (index.size + _KEY_SCALE_BYTES) // 2  # in elements of two bytes
    latent = replace(
        attention,
        index=index,
        most=index.topk,
        frozen=0 if index.shared else own,
        cache=attention.cache + (0 if index.shared else key),
        kept=attention.kept + (0 if index.shared else 2 * index.topk),
    )
    return replace(layer, attention=latent)
