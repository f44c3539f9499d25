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
    """The sizes of a layer's attention that memory and FLOPs depend on. Elements, not bytes.

    `params`: its matrices, which tensor-parallel ranks split; `whole`: further matrices that each rank has. `kept`:
    what the backward needs per token (input and output included, split over ranks). `context`: keys and values that
    context-parallel ranks gather per token. `cache`: what an engine keeps per token, all
    of it on each tensor-parallel rank if `cache_whole`. `state`: what it keeps per sequence of any length, and
    `newest` more for a convolution. `pair_flops`: forward FLOPs per
    (query, key) pair. `token_flops`: forward FLOPs per token beside the matrices.
    """

    params: int
    kept: int
    context: int
    cache: int
    pair_flops: int
    whole: int = 0
    token_flops: int = 0
    cache_whole: bool = False
    state: int = 0
    newest: int = 0

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
    """The sizes of gated delta net layers: `keys` heads of queries and keys, of size `key_dim`, and `values` heads of
    values, of size `value_dim`. Neighbouring value heads share a key head. A convolution sees the newest `taps` tokens.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    taps: int

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
    """One decoder layer. `kind` is the kind of its attention, a key of slime.megatron_backend.model.attention_kinds.

    A token sees the newest `window` tokens up to itself (None: all of them). `rope` is the number of its rotary
    embedding in `Decoder.ropes` (None: the layer has none). `sparse`: experts take the place of the MLP.
    """

    attention: Attention
    kind: str = "full"
    window: int | None = None
    rope: int | None = 0
    sparse: bool = False


@dataclass(frozen=True)
class Experts:
    """The experts of the sparse layers, `topk` of `count` per token. `shared` is the width of the shared expert, or 0.

    `score`: "softmax" over the experts, or "sigmoid" per expert. `bias`: a correction bias chooses the experts.
    `normalised`: the weights of a token's experts sum up to `scale`. `groups`: experts come from the best `groups[1]`
    of `groups[0]` groups. `shared_gate`: a sigmoid of the token weighs the shared expert. `biases`: the
    router and both products of an expert have one.
    """

    count: int
    topk: int
    width: int
    shared: int = 0
    score: str = "softmax"
    bias: bool = False
    normalised: bool = True
    groups: tuple[int, int] | None = None
    scale: float | None = None
    shared_gate: bool = False
    biases: bool = False


@dataclass(frozen=True)
class Decoder:
    """A decoder: sizes, layers, and what is particular about its parts.

    `output_bias`: a bias after the attention. `output_gate`: a sigmoid of the token weighs the output of attention.
    `qk_norm`: "" (none), "head" (RMSNorm of each head) or "projection" (RMSNorm of all heads together). `post_norms`:
    norms of the outputs of attention and MLP too. `activation` of the MLP or of the experts: a key of
    slime/megatron_backend/model. `zero_centred`: norms multiply by 1 + weight. `embedding_scale` multiplies the
    embeddings and `attention_scale` the scores of attention (None: 1 / sqrt(head)). `attention_cap` and `logit_cap`:
    scores and logits z become `cap * tanh(z / cap)`. `sinks`: each head has a learned score, whose share of the softmax
    goes to no token. `delta`: the sizes of gated delta net layers. `state_dtype`: the dtype of their state in an engine
    ("": that of the engine). `predictions`: the layers of multi-token prediction,
    which follow `layers`. `core`: further fields of megatron-core's TransformerConfig.
    """

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
    qk_norm: str = ""
    post_norms: bool = False
    activation: str = "swiglu"
    zero_centred: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    delta: DeltaNet | None = None
    state_dtype: str = ""
    predictions: tuple[Layer, ...] = ()
    core: Mapping[str, object] = field(default_factory=dict)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts in place of one MLP."""
        return tuple(layer.sparse for layer in self.layers)

    @property
    def stateful(self) -> bool:
        """Whether a layer has a state that runs through the tokens of a sample, which samples and context-parallel
        ranks cannot share as they share keys and values."""
        return self.delta is not None
