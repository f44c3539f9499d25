"""Counts the parameters that a trainer rank holds and trains, in the pipeline stage with the most parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slime.config import Config
from slime.models import Layer
from slime.models.lora import Lora
from slime.models.selection import Selection
from slime.plan.adapter_params import adapter_params
from slime.plan.model_shape import Params, Shape
from slime.plan.stages import build_stages
from slime.plan.tower import run_tower, trained_tower_params
from slime.plan.trained_params import list_end_matrices, trained_params
from slime.plan.units import count


class RankParams(NamedTuple):
    """The number of parameters on a rank, and the text of the arithmetic."""

    kind: str
    """Prefix of the items' names: "" or "expert "."""
    params: float
    """Number of parameters on the rank."""
    share: str
    """Text for the number of all parameters of the stage."""
    ranks: str
    """Text for the split of `share` over the ranks."""
    shards: int
    """Number of ranks that share the optimizer's state."""
    ends: float
    """The part of `params` that is in the embedding and the head."""


def rank_params(
    c: Config, shape: Shape, *, predicts: bool | None = None, head: bool = True, trained: bool = False
) -> Iterator[RankParams]:
    """Yields a record for all parameters except experts, then one for experts, of the stage with the most parameters on
    a rank. `predicts` includes the layers of multi-token prediction (default: if the run trains them). `head` includes
    the matrix of a vocabulary; a value head is too small to count. `trained` excludes parameters that are frozen by
    name."""
    predicts = c.algorithm.enable_mtp_training if predicts is None else predicts
    params, ends, stage = stage_params(c, shape, predicts, head=head, trained=trained)
    tp, ep, etp = (
        c.megatron.tensor_model_parallel_size,
        c.megatron.expert_model_parallel_size,
        c.megatron.expert_tensor_parallel,
    )
    replicas = c.data_parallel_size * c.megatron.context_parallel_size
    indexers = not trained and any(kind.attention.frozen for kind in shape.kinds)
    names = (
        ["routers"] * bool(shape.experts)
        + ["indexers"] * indexers
        + ["the vision tower"] * (run_tower(c, shape.hf) is not None)
    )
    of = "on each" if c.lora.lora_rank and trained else f"of {' and '.join(names or ['routers'])}"
    whole = f" / TP {tp} (+ {count(params.whole)} {of})" if params.whole else f" / TP {tp}"
    shards = replicas if c.megatron.use_distributed_optimizer else 1
    share = f"{count(params.split)}{stage}"
    yield RankParams("", params.split / tp + params.whole, share, whole, shards, ends / tp)
    if params.experts:
        shards = replicas * tp // (ep * etp) if c.megatron.use_distributed_optimizer else 1
        ranks = f" / EP {ep} / ETP {etp}"
        share = f"{count(params.experts)}{stage}"
        yield RankParams("expert ", params.experts / (ep * etp), share, ranks, shards, 0)


def stage_layers(c: Config, shape: Shape) -> list[tuple[Layer, ...]]:
    """Returns the layers per pipeline rank, over all its virtual stages."""
    stages = build_stages(c.megatron, shape.layers)
    return [tuple(shape.kinds[i] for i in stages.layers(rank)) for rank in range(stages.ranks)]


def stage_params(
    c: Config, shape: Shape, predicts: bool, *, head: bool = True, trained: bool = False
) -> tuple[Params, int, str]:
    """Returns the parameters of the largest pipeline stage, those of its matrices of the vocabulary, and the stage's
    description. A tied head is a copy on the last stage. With `predicts`, the last stage has the layers of multi-token
    prediction, and an embedding for them. Without `head`, it has no matrix of the vocabulary. `trained` counts the
    stage's trained parameters only, with all layers of multi-token prediction."""
    stages, vision = build_stages(c.megatron, shape.layers), run_tower(c, shape.hf)
    last = stages.ranks - 1
    tp, experts = (
        c.megatron.tensor_model_parallel_size,
        c.megatron.expert_model_parallel_size * c.megatron.expert_tensor_parallel,
    )

    def count_ends(rank: int, selection: Selection) -> Params:
        names = list_end_matrices(shape, first=rank == 0, last=rank == last, head=head)
        # layers of multi-token prediction on a later stage have a copy of the embedding
        copies = 1 if predicts and rank == last and last and not shape.tied else 0
        return trained_params(selection, shape, (), names) + shape.count_params((), copies)

    def of(rank: int, selection: Selection) -> Params:
        found = trained_params(selection, shape, stages.layers(rank), ()) + count_ends(rank, selection)
        if rank == 0 and vision is not None:
            found += Params(whole=trained_tower_params(selection, vision))
        return found + shape.predicting if predicts and rank == last else found

    sizes = [of(rank, Selection()) for rank in range(stages.ranks)]
    on_rank = [size.split / tp + size.whole + size.experts / experts for size in sizes]
    largest = max(range(len(sizes)), key=on_rank.__getitem__)
    described = f" of stage {largest}" if last else ""
    if (lora := Lora.of(c)) is not None and trained:
        return adapter_params(lora, shape.hf, stages.layers(largest)), 0, described
    selection = Selection.of(c) if trained else Selection()
    return of(largest, selection), count_ends(largest, selection).total, described
