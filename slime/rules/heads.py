"""Rules of a model's attention: the numbers of ranks that can share its heads, and the pipeline stages of layers that
share selected tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.models import Decoder
from slime.models.decoder import can_exchange_heads
from slime.models.latent import Latent
from slime.plan.stages import build_stages
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.config.schema import Config


def check_attention(c: Config, decoder: Decoder) -> None:
    """Raises ValueError if tensor- and context-parallel ranks cannot share the heads of the model, latent ones
    included, or if a pipeline stage needs the selected tokens of another stage."""
    _check_selections(c, decoder)
    tp, cp = c.megatron.tensor_model_parallel_size, c.megatron.context_parallel_size
    _divide(decoder.heads, "num_attention_heads", tp)
    if decoder.output_gate:
        _divide(decoder.groups, "num_key_value_heads of attention with an output gate", tp)
    if decoder.qk_norm == "projection":
        _divide(decoder.groups, "num_key_value_heads that share a norm", tp)
    if c.megatron.cp_comm_type == "a2a" and cp > 1 and decoder.selects:
        raise FlagError(
            "--cp-comm-type",
            "be all_gather for a model with an indexer, which needs the keys of all tokens",
            "a2a",
            "leave the flag out",
        )
    if decoder.wide is not None:
        _divide(decoder.wide.groups, "key heads of layers without a window", tp)
    narrow = decoder if decoder.wide is None else replace(decoder, groups=decoder.wide.groups)
    if c.megatron.cp_comm_type == "a2a" and not all(can_exchange_heads(d, tp, cp) for d in (decoder, narrow)):
        raise FlagError(
            "--context-parallel-size",
            f"divide the {decoder.heads // tp} query heads of a tensor-parallel rank, and divide or be a "
            f"multiple of its {max(narrow.groups // tp, 1)} heads of keys and values, with --cp-comm-type a2a",
            cp,
            "use --cp-comm-type all_gather or other sizes",
        )
    if decoder.delta:
        _check_groups(decoder.delta.keys, "linear_num_key_heads", tp, cp)
    if decoder.mamba:
        _check_groups(decoder.mamba.keys, "n_groups of Mamba-2 layers", tp, cp)


def _check_groups(groups: int, name: str, tp: int, cp: int) -> None:
    """Raises ValueError if tensor- and context-parallel ranks cannot share the groups of heads of layers with a
    state."""
    if groups % (tp * cp):
        raise FlagError(
            "--tensor-model-parallel-size x --context-parallel-size",
            f"divide the {groups} {name}",
            f"{tp} x {cp}: {groups} / {tp * cp} = {groups / (tp * cp):.3f}",
            "use fewer ranks",
        )


def _check_selections(c: Config, decoder: Decoder) -> None:
    """Raises ValueError if the first layer of a pipeline stage sees the tokens that a layer of an earlier stage
    selected."""
    stages = build_stages(c.megatron, len(decoder.layers))
    for rank in range(stages.ranks):
        for layers in stages.get_rank_layers(rank):
            attention = decoder.layers[layers.start].attention if layers else None
            index = attention.index if isinstance(attention, Latent) else None
            if index is not None and index.shared:
                raise FlagError(
                    "--pipeline-model-parallel-size and the flags that divide layers",
                    "begin each stage with a layer that has its own indexer",
                    f"layer {layers.start}, which uses the indexer of layer {index.source}",
                    "move the border with --decoder-first-pipeline-num-layers or --pipeline-model-parallel-layout",
                )


def indexer_notes(c: Config, decoder: Decoder) -> Iterator[str]:
    """Yields a note if the run states nothing about the indexers of its model, or about indexers that its model does
    not have."""
    has = any(isinstance(x.attention, Latent) and x.attention.index is not None for x in decoder.layers)
    if has and not c.train.freeze_indexer:
        yield (
            "the indexers of sparse attention keep their weights, as with --freeze-indexer: the loss has no gradient "
            "for the choice of tokens, and this version has no loss that trains indexers"
        )
    if c.train.freeze_indexer and not has:
        yield "--freeze-indexer has no effect: the model has no indexer"


def _divide(heads: int, what: str, ranks: int) -> None:
    if heads % ranks:
        raise FlagError(
            "--tensor-model-parallel-size",
            f"divide the {heads} {what}",
            f"{ranks}: {heads} / {ranks} = {heads / ranks:.3f}",
            "use fewer ranks",
        )
