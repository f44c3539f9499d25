"""The numbers of a model that its memory depends on, from config.json. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.hf_config import check_experts, expert_count, sparse_layers


@dataclass(frozen=True)
class Params:
    """Parameters by how ranks share them: `split` over tensor parallelism, `whole` on each rank (routers), and those of
    routed `experts` over expert parallelism. Matrices only: norms and biases are about a thousandth."""

    split: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: Params) -> Params:
        return Params(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.split + self.whole + self.experts


@dataclass(frozen=True)
class Shape:
    """A decoder. `q` and `kv` are heads times head size; `sparse` says of each layer whether `experts` of width
    `expert_ffn`, of which a token goes to `topk`, stand in place of its MLP of width `ffn`."""

    layers: int
    hidden: int
    ffn: int
    q: int
    kv: int
    vocab: int
    tied: bool
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    sparse: tuple[bool, ...] = ()

    @classmethod
    def of(cls, hf: dict[str, Any]) -> Shape:
        """ValueError for experts that the trainer does not know."""
        check_experts(hf)
        heads = hf["num_attention_heads"]
        head = hf.get("head_dim") or hf["hidden_size"] // heads
        experts = expert_count(hf)
        return cls(
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            ffn=hf["intermediate_size"],
            q=heads * head,
            kv=(hf.get("num_key_value_heads") or heads) * head,
            vocab=hf["vocab_size"],
            tied=hf.get("tie_word_embeddings", False),
            experts=experts,
            topk=hf["num_experts_per_tok"] if experts else 0,
            expert_ffn=hf["moe_intermediate_size"] if experts else 0,
            sparse=sparse_layers(hf),
        )

    def layer(self, sparse: bool = False) -> Params:
        """One layer: q, k, v, o, and the gated MLP or router and experts."""
        attention = self.hidden * (2 * self.q + 2 * self.kv)
        if not sparse:
            return Params(split=attention + 3 * self.hidden * self.ffn)
        experts = 3 * self.experts * self.hidden * self.expert_ffn
        return Params(split=attention, whole=self.hidden * self.experts, experts=experts)

    def params_of(self, layers: Sequence[bool], ends: int) -> Params:
        """Of layers, given whether each is sparse, and as many matrices [vocab, hidden] as `ends`."""
        return sum((self.layer(sparse) for sparse in layers), Params(split=self.vocab * self.hidden * ends))

    @property
    def params(self) -> int:
        """Matrices of the whole model."""
        return self.params_of(self.sparse, 1 if self.tied else 2).total

    @property
    def active(self) -> int:
        """Matrices of the layers that one token goes through."""
        idle = 3 * self.hidden * self.expert_ffn * (self.experts - self.topk) * sum(self.sparse)
        return self.params_of(self.sparse, 0).total - idle
