"""The record of a decoder, which every family reads from its config.json in the same vocabulary.

Trainer, planner and flag checks read this record and never use a family's name. The module imports neither torch nor
Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slime.models.rope import Hf as Hf
from slime.models.rope import Rope

if TYPE_CHECKING:
    from slime.models.vision import Vision


@dataclass(frozen=True)
class Attention:
    """Sizes of a layer's attention that determine memory and FLOPs, in elements, not bytes."""

    params: int
    """Elements of the matrices that tensor-parallel ranks split."""
    kept: int
    """Elements that the backward needs per token (input and output included, split over ranks)."""
    context: int
    """Elements of keys and values that context-parallel ranks gather per token."""
    cache: int
    """Elements that an engine keeps per token."""
    pair_flops: int
    """Forward FLOPs per (query, key) pair."""
    whole: int = 0
    """Elements of further matrices, which every rank holds completely."""
    frozen: int = 0
    """Elements of further matrices, which every rank holds completely and no run trains."""
    most: int | None = None
    """Most tokens that a token sees. None means all previous tokens."""
    token_flops: int = 0
    """Forward FLOPs per token in addition to the matrices."""
    cache_whole: bool = False
    """Every tensor-parallel rank has the whole `cache`."""
    state: int = 0
    """Elements that an engine keeps per sequence, for any length."""
    scanned: int = 0
    """Elements in float32 that the backward of the layer makes per token, if it computes a recurrent layer again in
    plain PyTorch."""
    newest: int = 0
    """Further elements per sequence that an engine keeps for a convolution."""

    @classmethod
    def grouped(cls, hidden: int, q: int, kv: int) -> Attention:
        """Returns softmax attention with grouped heads. `q` and `kv` are the number of heads times the head size."""
        return cls(
            params=hidden * (2 * q + 2 * kv),
            kept=4 * q + 4 * kv,
            context=2 * kv,
            cache=2 * kv,
            pair_flops=4 * q,
        )


NO_ATTENTION = Attention(params=0, kept=0, context=0, cache=0, pair_flops=0)
"""The sizes of a layer of kind "none", which has an MLP or experts only."""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of gated delta net layers. Neighbouring value heads share a key head."""

    keys: int
    """Number of heads of queries and keys."""
    values: int
    """Number of heads of values."""
    key_dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    """Size of a head of values."""
    taps: int
    """Number of newest tokens that a convolution sees."""

    @property
    def heads_per_key(self) -> int:
        """Returns the number of value heads per key head."""
        return self.values // self.keys

    @property
    def widths(self) -> tuple[int, int, int, int, int, int]:
        """Returns the rows of the input projection for one key head: query, key, values, their output gates, beta,
        decay."""
        wide = self.heads_per_key * self.value_dim
        return self.key_dim, self.key_dim, wide, wide, self.heads_per_key, self.heads_per_key

    def attention(self, hidden: int) -> Attention:
        """Returns the sizes of the layer. Its state [values, value_dim, key_dim] has a fixed size, so tokens do not add
        to an engine's cache. The convolution needs the inputs of `taps - 1` tokens.

        The least work per token is three products with each value head's state [key_dim, value_dim], and the
        convolution. With kernels, the backward keeps the projection, the convolution's output, the kernel's 64 x 64
        matrices and output, and the outputs of norm and layer. In plain PyTorch, it keeps less, and computes all
        between the projections again, in chunks of 64 tokens. `scanned` fits the peaks of ten shapes on a CPU.
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
            scanned=5 * 64 * self.values + 17 * self.key_dim * self.values + 10 * v + 6 * convolved,
            newest=(self.taps - 1) * convolved,
        )


@dataclass(frozen=True)
class Mamba:
    """Sizes of Mamba-2 layers. The heads of a group are neighbours and share B and C."""

    keys: int
    """Number of groups."""
    heads: int
    head_dim: int
    state: int
    """Size of B and C."""
    taps: int
    """Number of newest tokens that a convolution sees."""
    conv_bias: bool = True

    @property
    def share(self) -> int:
        """Returns the number of heads of a group."""
        return self.heads // self.keys

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """Returns the rows of the input projection for one group: gates, values, B, C, time steps."""
        wide = self.share * self.head_dim
        return wide, wide, self.state, self.state, self.share

    def attention(self, hidden: int) -> Attention:
        """Returns the sizes of the layer. Its state [heads, state, head_dim] has a fixed size.

        The least work per token is two products with each head's state, and the convolution. The backward keeps the
        projection and the output of the norm. It computes all between them again, in chunks of 64 tokens. `scanned`
        fits the peaks of nine shapes on a CPU.
        """
        gates, values, b, c, steps = (self.keys * width for width in self.widths)
        mixed, convolved = gates + values + b + c + steps, values + b + c
        return Attention(
            params=hidden * mixed + values * hidden,
            kept=mixed + values,
            context=0,
            cache=0,
            pair_flops=0,
            token_flops=4 * self.state * values + 2 * self.taps * convolved,
            state=self.state * values,
            scanned=2 * 64 * self.heads + 10 * values + self.state * values // 64 + 9 * convolved,
            newest=(self.taps - 1) * convolved,
        )


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: Attention
    kind: str = "full"
    """Kind of the attention, a key of slime.megatron_backend.model.attention_kinds."""
    window: int | None = None
    """Number of newest tokens, itself included, that a token sees. None means all tokens."""
    rope: int | None = 0
    """Index of the rotary embedding in `Decoder.ropes`. None means that the layer has no rotary embedding."""
    sparse: bool = False
    """Experts replace the MLP."""
    mlp: bool = True
    """The layer has an MLP or experts. A layer of kind "none" has nothing else."""

    @property
    def dense(self) -> bool:
        """Returns whether the layer has an MLP."""
        return self.mlp and not self.sparse

    @property
    def softmax(self) -> bool:
        """Returns whether the layer has softmax attention, with keys and values."""
        return self.kind not in ("gated_delta_net", "mamba", "none")

    @property
    def sees(self) -> int | None:
        """Returns the most tokens that a token sees. None means all previous tokens."""
        return min((limit for limit in (self.window, self.attention.most) if limit is not None), default=None)


@dataclass(frozen=True)
class WideHeads:
    """Heads of the layers of kind "keys_as_values", which differ from those of the other layers."""

    groups: int
    """Number of heads of keys."""
    head_dim: int


@dataclass(frozen=True)
class Experts:
    """The experts of the sparse layers."""

    count: int
    topk: int
    """Number of experts per token."""
    width: int
    shared: int = 0
    """Width of the shared expert, or 0."""
    score: str = "softmax"
    """"softmax" over the experts, or "sigmoid" per expert."""
    bias: bool = False
    """A correction bias is added to the scores when a token's experts are chosen."""
    normalised: bool = True
    """The weights of a token's experts sum up to `scale`."""
    groups: tuple[int, int] | None = None
    """Experts come from the best `groups[1]` of `groups[0]` groups."""
    scale: float | None = None
    shared_gate: bool = False
    """A sigmoid that depends on the token multiplies the shared expert's output."""
    biases: bool = False
    """The router and both products of an expert have biases."""
    parallel: bool = False
    """Shared expert and routed experts read the residual stream, and have separate norms."""


@dataclass(frozen=True)
class Decoder:
    """A decoder: its sizes, its layers, and the options of its parts."""

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
    """The attention's output projection has a bias."""
    qk_norm: str = ""
    """"" (no norm), "head" (RMSNorm per head) or "projection" (RMSNorm over all heads together)."""
    pre_norms: bool = True
    """The inputs of attention and MLP have norms."""
    post_norms: bool = False
    """The outputs of attention and MLP have norms."""
    activation: str = "swiglu"
    """Activation of the MLP or the experts, a key of slime/megatron_backend/model."""
    gated: bool = True
    """The first product of an MLP or expert computes a gate and a value. Without a gate, it computes the value only."""
    zero_centred: bool = False
    """Norms multiply by 1 + weight."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    attention_scale: float | None = None
    """Factor of the attention scores. None means 1 / sqrt(head_dim)."""
    attention_cap: float | None = None
    """Cap of the attention scores: a score z becomes `cap * tanh(z / cap)`."""
    logit_cap: float | None = None
    """Cap of the logits: a logit z becomes `cap * tanh(z / cap)`."""
    sinks: bool = False
    """Every head has a learned score, whose share of the softmax goes to no token."""
    output_gate: bool = False
    """A sigmoid that depends on the token multiplies the attention's output."""
    wide: WideHeads | None = None
    """Heads of layers of kind "keys_as_values"."""
    layer_scale: bool = False
    """A frozen factor multiplies each layer's output."""
    delta: DeltaNet | None = None
    """Sizes of gated delta net layers."""
    mamba: Mamba | None = None
    """Sizes of Mamba-2 layers."""
    state_dtype: str = ""
    """Dtype of the layers' state in an engine. "" means the engine's dtype."""
    predictions: tuple[Layer, ...] = ()
    """Layers of multi-token prediction, which follow `layers`."""
    vision: Vision | None = None
    """Tower that computes the embeddings of image tokens. None for a text model."""
    core: Mapping[str, object] = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig."""

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Returns, per layer, whether it has experts instead of an MLP."""
        return tuple(layer.sparse for layer in self.layers)

    @property
    def stateful(self) -> bool:
        """Returns whether a layer has a state that runs through the tokens of a sample. Samples and context-parallel
        ranks cannot share this state in the way that they share keys and values."""
        return self.recurrent is not None

    @property
    def recurrent(self) -> DeltaNet | Mamba | None:
        """Returns the sizes of the layers with a state, if the model has such layers."""
        return self.delta or self.mamba

    @property
    def selects(self) -> bool:
        """Returns whether a layer's queries see selected tokens."""
        return any(layer.attention.most is not None for layer in self.layers)


class Heads(Protocol):
    """A model with attention heads."""

    @property
    def heads(self) -> int:
        """Returns the number of heads of queries."""

    @property
    def groups(self) -> int:
        """Returns the number of heads of keys and values."""

    @property
    def selects(self) -> bool:
        """Returns whether a layer's queries see selected tokens."""


def choose_exchange(wanted: str | None, model: Heads, tp: int, cp: int) -> str:
    """Returns how `cp` context-parallel ranks compute attention: `wanted` (--cp-comm-type), or else "a2a" if the ranks
    can exchange heads, and "all_gather" if they cannot."""
    return wanted or ("a2a" if can_exchange_heads(model, tp, cp) else "all_gather")


def can_exchange_heads(model: Heads, tp: int, cp: int) -> bool:
    """Returns whether each of `cp` ranks gets equally many query heads of a tensor-parallel rank, and whole heads of
    keys and values, which several ranks may share. Ranks select tokens for the queries of their own tokens only."""
    if model.selects:
        return False
    heads, groups = model.heads // tp, max(model.groups // tp, 1)
    return heads % cp == 0 and (groups % cp == 0 or cp % groups == 0)
