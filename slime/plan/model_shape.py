"""The sizes of a model that determine its memory, from config.json. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slime.models import Decoder, Experts, Layer, family_for, read_decoder
from slime.models.decoder import Hf


@dataclass(frozen=True)
class Params:
    """Parameter counts by how ranks share them. Only matrices count: norms and biases are about a thousandth of the
    parameters."""

    split: int = 0
    """Parameters that tensor parallelism splits."""
    whole: int = 0
    """Parameters that each rank holds completely (routers)."""
    experts: int = 0
    """Parameters of routed experts, which expert parallelism splits."""

    def __add__(self, other: Params) -> Params:
        return Params(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.split + self.whole + self.experts


_NONE = Experts(count=0, topk=0, width=0)


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that determine its memory."""

    hidden: int
    ffn: int
    """Width of the MLP of a dense layer."""
    vocab: int
    tied: bool
    kinds: tuple[Layer, ...]
    groups: int
    """Number of heads of keys and values."""
    heads: int = 1
    """Number of heads of queries."""
    experts: int = 0
    """Number of experts of a sparse layer, which replace the MLP."""
    topk: int = 0
    """Number of experts per token."""
    expert_ffn: int = 0
    """Width of an expert."""
    shared_ffn: int = 0
    """Width of the one shared expert."""
    gated: bool = True
    """The first product of an MLP or expert computes a gate and a value."""
    post_norms: bool = False
    """The outputs of attention and MLP have norms."""
    parallel: bool = False
    """Shared expert and routed experts have separate norms."""
    state_dtype: str = ""
    """Dtype of the layers' state in an engine, "" for the engine's dtype."""
    predictions: tuple[Layer, ...] = ()
    """Layers of multi-token prediction, if the family trains them. Only functions that mention them count them."""
    rows: tuple[str, ...] = ()
    """The family's names of parameters, with {i} and {e} for the numbers of layers and experts."""
    hf: Hf = field(default_factory=dict, compare=False)
    """The config.json from which the shape was read."""

    @classmethod
    def of(cls, hf: Hf) -> Shape:
        """Returns the shape in config.json. Raises ValueError for an unsupported model."""
        rows = tuple(row.megatron for row in family_for(hf).rows)
        return replace(cls.from_decoder(read_decoder(hf)), rows=rows, hf=hf)

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> Shape:
        experts = decoder.experts or _NONE
        return cls(
            hidden=decoder.hidden,
            ffn=decoder.ffn,
            vocab=decoder.vocab,
            tied=decoder.tied,
            kinds=decoder.layers,
            groups=decoder.groups,
            heads=decoder.heads,
            experts=experts.count,
            topk=experts.topk,
            expert_ffn=experts.width,
            shared_ffn=experts.shared,
            gated=decoder.gated,
            post_norms=decoder.post_norms,
            parallel=experts.parallel,
            state_dtype=decoder.state_dtype,
            predictions=decoder.predictions,
        )

    @property
    def selects(self) -> bool:
        """Returns whether a layer's queries see selected tokens."""
        return any(kind.attention.most is not None for kind in self.kinds)

    @property
    def first(self) -> int:
        """Returns the outputs of the first product of an MLP or expert, divided by its width."""
        return 2 if self.gated else 1

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def cache(self) -> int:
        """Returns the elements that an engine keeps per token, over all layers."""
        return sum(kind.attention.cache for kind in self.kinds)

    @property
    def cache_whole(self) -> int:
        """Returns the part of `cache` that each tensor-parallel rank of an engine keeps whole."""
        return sum(kind.attention.cache for kind in self.kinds if kind.attention.cache_whole)

    @property
    def state(self) -> int:
        """Returns the elements of the layers' states that an engine keeps per sequence."""
        return sum(kind.attention.state for kind in self.kinds)

    @property
    def newest(self) -> int:
        """Returns the elements that an engine keeps per sequence for the layers' convolutions."""
        return sum(kind.attention.newest for kind in self.kinds)

    def layer(self, kind: Layer | None = None) -> Params:
        """Returns the parameters of a layer (default: the first): attention, and the MLP or router and experts."""
        kind = kind or self.kinds[0]
        attention = Params(split=kind.attention.params, whole=kind.attention.whole + kind.attention.frozen)
        if not kind.mlp:
            return attention
        one = (self.first + 1) * self.hidden
        if not kind.sparse:
            return attention + Params(split=one * self.ffn)
        experts = one * self.experts * self.expert_ffn
        shared = one * self.shared_ffn
        return attention + Params(split=shared, whole=self.hidden * self.experts, experts=experts)

    @property
    def predicting(self) -> Params:
        """Returns the parameters of the layers of multi-token prediction, each with a product of embedding and
        state."""
        products = Params(split=2 * self.hidden**2 * len(self.predictions))
        return sum(map(self.layer, self.predictions), products)

    def count_params(self, kinds: Iterable[Layer], ends: int) -> Params:
        """Returns the parameters of layers and of `ends` matrices [vocab, hidden]."""
        return sum(map(self.layer, kinds), Params(split=self.vocab * self.hidden * ends))

    @property
    def params(self) -> int:
        """Returns the parameters of the whole model, matrices only."""
        return self.count_params(self.kinds, 1 if self.tied else 2).total

    @property
    def active(self) -> int:
        """Returns the parameters that a token passes through in the layers, matrices only."""
        return self.count_params(self.kinds, 0).total - self._idle(self.kinds)

    @property
    def active_predicting(self) -> int:
        """Returns the parameters that a token passes through in the layers of multi-token prediction."""
        return self.predicting.total - self._idle(self.predictions)

    def _idle(self, kinds: Iterable[Layer]) -> int:
        """Returns the parameters of experts that a token does not go to."""
        sparse = sum(kind.sparse for kind in kinds)
        return (self.first + 1) * self.hidden * self.expert_ffn * (self.experts - self.topk) * sparse
