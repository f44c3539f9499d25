"""What a decoder is: the record that a family reads from config.json, in one vocabulary for all families.

Trainer, planner and flag checks read this record and never ask for a family's name. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime.models.rope import Hf as Hf
from slime.models.rope import Rope


@dataclass(frozen=True)
class Attention:
    """The sizes of a layer's attention that memory and FLOPs depend on. Elements, not bytes."""

    params: int
    """Its matrices, which tensor-parallel ranks split."""
    kept: int
    """What the backward needs per token (input and output included, split over ranks)."""
    context: int
    """Keys and values that context-parallel ranks gather per token."""
    cache: int
    """What an engine keeps per token."""
    pair_flops: int
    """Forward FLOPs per (query, key) pair."""
    whole: int = 0
    """Further matrices that each rank has."""
    token_flops: int = 0
    """Forward FLOPs per token beside the matrices."""
    cache_whole: bool = False
    """Each tensor-parallel rank has all of `cache`."""
    state: int = 0
    """What an engine keeps per sequence of any length."""
    newest: int = 0
    """What it keeps more for a convolution."""

    @classmethod
    def grouped(cls, hidden: int, q: int, kv: int) -> Attention:
        """Softmax attention with grouped heads. `q` and `kv` are heads times head size."""
        return cls(
            params=hidden * (2 * q + 2 * kv),
            kept=4 * q + 4 * kv,
            context=2 * kv,
            cache=2 * kv,
            pair_flops=4 * q,
        )


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of gated delta net layers. Neighbouring value heads share a key head."""

    keys: int
    """Number of heads of queries and keys."""
    values: int
    """Number of heads of values."""
    key_dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    """Size of a head of values."""
    taps: int
    """A convolution sees so many of the newest tokens."""

    @property
    def of_key(self) -> int:
        """Value heads per key head."""
        return self.values // self.keys

    @property
    def widths(self) -> tuple[int, int, int, int, int, int]:
        """Rows of the input projection for one key head: query, key, values, their output gates, beta, decay."""
        wide = self.of_key * self.value_dim
        return self.key_dim, self.key_dim, wide, wide, self.of_key, self.of_key

    def attention(self, hidden: int) -> Attention:
        """What the layer costs. Its state [values, value_dim, key_dim] has a fixed size, so no token adds to
        the cache of an engine. The convolution needs the inputs of `taps - 1` tokens.

        The least work per token is three products with the state [key_dim, value_dim] of each value head, and the
        convolution. Kept are the projection, the convolution's output, the kernel's 64 x 64 matrices, its output, the
        norm's and the layer's.
        """
        q, k, v, gates, *one = (self.keys * width for width in self.widths)
        mixed, convolved = q + k + v + gates + sum(one), q + k + v
        return Attention(
            params=hidden * mixed + v * hidden,
            kept=mixed + convolved + q + k + 64 * self.values + 2 * v,
            context=0,
            cache=0,
            pair_flops=0,
            token_flops=6 * self.key_dim * v + 2 * self.taps * convolved,
            state=self.key_dim * v,
            newest=(self.taps - 1) * convolved,
        )


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: Attention
    kind: str = "full"
    """The kind of its attention, a key of slime.megatron_backend.model.attention_kinds."""
    window: int | None = None
    """A token sees so many of the newest tokens up to itself. None: all of them."""
    rope: int | None = 0
    """The number of its rotary embedding in `Decoder.ropes`. None: the layer has none."""
    sparse: bool = False
    """Experts take the place of the MLP."""


@dataclass(frozen=True)
class Experts:
    """The experts of the sparse layers."""

    count: int
    topk: int
    """Experts per token."""
    width: int
    shared: int = 0
    """The width of the shared expert, or 0."""
    score: str = "softmax"
    """"softmax" over the experts, or "sigmoid" per expert."""
    bias: bool = False
    """A correction bias chooses the experts."""
    normalised: bool = True
    """The weights of a token's experts sum up to `scale`."""
    groups: tuple[int, int] | None = None
    """Experts come from the best `groups[1]` of `groups[0]` groups."""
    scale: float | None = None
    shared_gate: bool = False
    """A sigmoid of the token weighs the shared expert."""
    biases: bool = False
    """The router and both products of an expert have one."""


@dataclass(frozen=True)
class Decoder:
    """A decoder: sizes, layers, and what is particular about its parts."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    experts: Experts | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias after the attention."""
    qk_norm: str = ""
    """"" (none), "head" (RMSNorm of each head) or "projection" (RMSNorm of all heads together)."""
    post_norms: bool = False
    """Norms of the outputs of attention and MLP too."""
    activation: str = "swiglu"
    """Of the MLP or of the experts: a key of slime/megatron_backend/model."""
    zero_centred: bool = False
    """Norms multiply by 1 + weight."""
    embedding_scale: float = 1.0
    """Multiplies the embeddings."""
    attention_scale: float | None = None
    """Multiplies the scores of attention. None: 1 / sqrt(head)."""
    attention_cap: float | None = None
    """Scores z become `cap * tanh(z / cap)`."""
    logit_cap: float | None = None
    """Logits z become `cap * tanh(z / cap)`."""
    sinks: bool = False
    """Each head has a learned score, whose share of the softmax goes to no token."""
    output_gate: bool = False
    """A sigmoid of the token weighs the output of attention."""
    delta: DeltaNet | None = None
    """The sizes of gated delta net layers."""
    state_dtype: str = ""
    """The dtype of their state in an engine. "": that of the engine."""
    predictions: tuple[Layer, ...] = ()
    """The layers of multi-token prediction, which follow `layers`."""
    core: Mapping[str, object] = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig."""

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts in place of one MLP."""
        return tuple(layer.sparse for layer in self.layers)

    @property
    def stateful(self) -> bool:
        """Whether a layer has a state that runs through the tokens of a sample, which samples and context-parallel
        ranks cannot share as they share keys and values."""
        return self.delta is not None
