"""Multi-head latent attention (DeepSeek-V2, 2405.04434, part 2.1): its sizes, its rows and its reader of config.json.

One latent vector per token produces the keys and values for all heads. Queries may come from a latent vector too. A
part of every query and key has no position. The other part is rotated, and all heads share that part of the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.models.decoder import Attention, Decoder, Hf, Layer
from slime.models.layouts import Direct, Row
from slime.models.reading import check_experts, need, only, sigmoid_experts, sizes
from slime.models.rope import Rope, mscale, read_rope
from slime.models.rows import ENDS, EXPERTS, HF, MG, MLP, NORMS, OUTPUT_BIAS, ROUTER_BIAS, SHARED_EXPERT


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
