"""The sizes of a model that its memory depends on, from config.json. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from slime.models import Decoder, Experts, Layer, decoder_of, family_for
from slime.models.decoder import Hf


@dataclass(frozen=True)
class Params:
    """Parameter counts by how ranks share them. Matrices only: norms and biases are about a thousandth of them."""

    split: int = 0
    """Over tensor parallelism."""
    whole: int = 0
    """On each rank (routers)."""
    experts: int = 0
    """Routed experts, over expert parallelism."""

    def __add__(self, other: Params) -> Params:
        return Params(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.split + self.whole + self.experts


_NONE = Experts(count=0, topk=0, width=0)


@dataclass(frozen=True)
class Shape:
    """The counts of a decoder."""

    hidden: int
    ffn: int
    """The width of the MLP of a dense layer."""
    vocab: int
    tied: bool
    kinds: tuple[Layer, ...]
    groups: int
    """Heads of keys and values."""
    experts: int = 0
    """Number of experts of a sparse layer, in place of the MLP."""
    topk: int = 0
    """Experts per token."""
    expert_ffn: int = 0
    """The width of an expert."""
    shared_ffn: int = 0
    """The width of the one shared expert."""
    post_norms: bool = False
    """The outputs of attention and MLP have norms."""
    state_dtype: str = ""
    """That of the layers' state in an engine, "" for the engine's."""
    predictions: tuple[Layer, ...] = ()
    """The layers of multi-token prediction, if the family trains them. Only what says so counts them."""
    rows: tuple[str, ...] = ()
    """The family's names of parameters, with {i} and {e} for the numbers of layers and experts."""
    hf: Hf = field(default_factory=dict, compare=False)
    """The config.json that it was read from."""

    @classmethod
    def of(cls, hf: Hf) -> Shape:
        """The shape in config.json. ValueError for a model that is not supported."""
        rows = tuple(row.megatron for row in family_for(hf).rows)
        return replace(cls.from_decoder(decoder_of(hf)), rows=rows, hf=hf)

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
            experts=experts.count,
            topk=experts.topk,
            expert_ffn=experts.width,
            shared_ffn=experts.shared,
            post_norms=decoder.post_norms,
            state_dtype=decoder.state_dtype,
            predictions=decoder.predictions,
        )

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def cache(self) -> int:
        """Elements of all layers that an engine keeps per token."""
        return sum(kind.attention.cache for kind in self.kinds)

    @property
    def cache_whole(self) -> int:
        """The part of `cache` that each tensor-parallel rank of an engine keeps whole."""
        return sum(kind.attention.cache for kind in self.kinds if kind.attention.cache_whole)

    @property
    def state(self) -> int:
        """Elements of all layers' states that an engine keeps per sequence."""
        return sum(kind.attention.state for kind in self.kinds)

    @property
    def newest(self) -> int:
        """Elements that an engine keeps per sequence for all layers' convolutions."""
        return sum(kind.attention.newest for kind in self.kinds)

    def layer(self, kind: Layer | None = None) -> Params:
        """One layer (default: the first): attention, and the gated MLP or router and experts."""
        kind = kind or self.kinds[0]
        attention = Params(split=kind.attention.params, whole=kind.attention.whole)
        if not kind.sparse:
            return attention + Params(split=3 * self.hidden * self.ffn)
        experts = 3 * self.experts * self.hidden * self.expert_ffn
        shared = 3 * self.hidden * self.shared_ffn
        return attention + Params(split=shared, whole=self.hidden * self.experts, experts=experts)

    @property
    def predicting(self) -> Params:
        """All layers of multi-token prediction: each has a product of embedding and state, too."""
        products = Params(split=2 * self.hidden**2 * len(self.predictions))
        return sum(map(self.layer, self.predictions), products)

    def params_of(self, kinds: Iterable[Layer], ends: int) -> Params:
        """Parameters of layers and of `ends` matrices [vocab, hidden]."""
        return sum(map(self.layer, kinds), Params(split=self.vocab * self.hidden * ends))

    @property
    def params(self) -> int:
        """Parameters of the whole model, matrices only."""
        return self.params_of(self.kinds, 1 if self.tied else 2).total

    @property
    def active(self) -> int:
        """Parameters that one token goes through in the layers, matrices only."""
        return self.params_of(self.kinds, 0).total - self._idle(self.kinds)

    @property
    def active_predicting(self) -> int:
        """The same of the layers of multi-token prediction."""
        return self.predicting.total - self._idle(self.predictions)

    def _idle(self, kinds: Iterable[Layer]) -> int:
        """Parameters of experts that a token does not go to."""
        sparse = sum(kind.sparse for kind in kinds)
        return 3 * self.hidden * self.expert_ffn * (self.experts - self.topk) * sparse
