"""The sizes of a model that its memory depends on, from config.json. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.hf_config import check_experts, expert_count, shared_expert_width, sparse_layers


@dataclass(frozen=True)
class Params:
    """Parameter counts by how ranks share them: `split` over tensor parallelism, `whole` on each rank (routers), and
    routed `experts` over expert parallelism. Matrices only: norms and biases are about a thousandth of them."""

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
    """A decoder. `q` and `kv` are heads times head size. A dense layer has an MLP of width `ffn`. A layer with
    `sparse[i]` has `experts` of width `expert_ffn` instead, of which each token uses `topk`, and one shared expert of
    width `shared_ffn`."""

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
    shared_ffn: int = 0
    sparse: tuple[bool, ...] = ()

    @classmethod
    def of(cls, hf: dict[str, Any]) -> Shape:
        """The shape in config.json. ValueError for experts that the trainer does not support."""
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
            shared_ffn=shared_expert_width(hf),
            sparse=sparse_layers(hf),
        )

    def layer(self, sparse: bool = False) -> Params:
        """One layer: q, k, v, o, and the gated MLP or router and experts."""
        attention = self.hidden * (2 * self.q + 2 * self.kv)
        if not sparse:
            return Params(split=attention + 3 * self.hidden * self.ffn)
        experts = 3 * self.experts * self.hidden * self.expert_ffn
        attention_and_shared = attention + 3 * self.hidden * self.shared_ffn
        return Params(split=attention_and_shared, whole=self.hidden * self.experts, experts=experts)

    def params_of(self, layers: Sequence[bool], ends: int) -> Params:
        """Parameters of layers (`layers`: whether each is sparse) and of `ends` matrices [vocab, hidden]."""
        return sum((self.layer(sparse) for sparse in layers), Params(split=self.vocab * self.hidden * ends))

    @property
    def params(self) -> int:
        """Parameters of the whole model, matrices only."""
        return self.params_of(self.sparse, 1 if self.tied else 2).total

    @property
    def active(self) -> int:
        """Parameters that one token goes through in the layers, matrices only."""
        idle = 3 * self.hidden * self.expert_ffn * (self.experts - self.topk) * sum(self.sparse)
        return self.params_of(self.sparse, 0).total - idle
