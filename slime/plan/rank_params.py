"""Counts the parameters that a trainer rank holds and trains, in the pipeline stage with the most parameters."""

from __future__ import annotations

from collections.abc import Iterator

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


def rank_params(
    c: Config, shape: Shape, *, predicts: bool | None = None, head: bool = True, trained: bool = False
) -> Iterator[tuple[str, float, str, str, int]]:
    """Yields a tuple for all parameters except experts, then one for experts, of the stage with the most parameters on
    a rank. The tuple is (prefix of the items' names, parameters on a rank, all parameters, how they are split, ranks
    that share their optimizer state). `predicts`: include the layers of multi-token prediction (default: if the run
    trains them). `head`: include the matrix of a vocabulary; a value head is too small to count. `trained`: exclude
    parameters that are frozen by name."""
    predicts = c.algorithm.enable_mtp_training if predicts is None else predicts
    params, stage = stage_params(c, shape, predicts, head=head, trained=trained)
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
    yield "", params.split / tp + params.whole, f"{count(params.split)}{stage}", whole, shards
    if params.experts:
        shards = replicas * tp // (ep * etp) if c.megatron.use_distributed_optimizer else 1
        ranks = f" / EP {ep} / ETP {etp}"
        yield "expert ", params.experts / (ep * etp), f"{count(params.experts)}{stage}", ranks, shards


def stage_layers(c: Config, shape: Shape) -> list[tuple[Layer, ...]]:
    """Returns the layers per pipeline rank, over all its virtual stages."""
    stages = build_stages(c.megatron, shape.layers)
    return [tuple(shape.kinds[i] for i in stages.layers(rank)) for rank in range(stages.ranks)]


def stage_params(
    c: Config, shape: Shape, predicts: bool, *, head: bool = True, trained: bool = False
) -> tuple[Params, str]:
    """Returns the parameters of the largest pipeline stage, and its description. A tied head is a copy on the last
    stage. With `predicts`, the last stage has the layers of multi-token prediction, and an embedding for them. Without
    `head`, it has no matrix of the vocabulary. `trained`: count the stage's trained parameters only, with all layers of
    multi-token prediction."""
    stages, vision = build_stages(c.megatron, shape.layers), run_tower(c, shape.hf)
    last = stages.ranks - 1
    tp, experts = (
        c.megatron.tensor_model_parallel_size,
        c.megatron.expert_model_parallel_size * c.megatron.expert_tensor_parallel,
    )

    def of(rank: int, selection: Selection) -> Params:
        layers, ends = (
            stages.layers(rank),
            list_end_matrices(shape, first=rank == 0, last=rank == last, head=head),
        )
        found = trained_params(selection, shape, layers, ends)
        if rank == 0 and vision is not None:
            found += Params(whole=trained_tower_params(selection, vision))
        if predicts and rank == last:
            copy = 0 if shape.tied or not last else 1  # a copy of the embedding
            found += shape.predicting + shape.count_params((), copy)
        return found

    sizes = [of(rank, Selection()) for rank in range(stages.ranks)]
    on_rank = [size.split / tp + size.whole + size.experts / experts for size in sizes]
    largest = max(range(len(sizes)), key=on_rank.__getitem__)
    described = f" of stage {largest}" if last else ""
    if (lora := Lora.of(c)) is not None and trained:
        return adapter_params(lora, shape.hf, stages.layers(largest)), described
    return (of(largest, Selection.of(c)) if trained else sizes[largest]), described
