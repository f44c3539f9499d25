"""The names of parameters in the whole model, which are equal on every rank, and the parameters that are frozen by
name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from slime.bridges.megatron_versions import stored_name
from slime.config import Config
from slime.config.fields import spelled
from slime.megatron_backend.model.value_head import PARAMETER as VALUE_HEAD
from slime.models import family_for
from slime.models.layouts import Row
from slime.models.selection import FROZEN, ONLY, Selection

Part: TypeAlias = Any
"""A part of a rank's model, a GPTModel of Megatron without a wrapper. megatron-core has no types."""
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)")
_EXPERT = re.compile(r"(\.local_experts\.)(\d+)")
_PREDICTION = re.compile(r"^(mtp\.layers\.)(\d+)")

_TIED = ("output_layer.weight", "embedding.word_embeddings.weight")
"""A tied head is the embedding. A last stage without the embedding has a copy of the embedding."""


def whole_model_name(inner: Part, name: str, expert_rank: int | None = None) -> str:
    """Returns the name in the whole model of the parameter `name` of `inner`, a GPTModel. With `expert_rank`, an expert
    has its name on that expert-parallel rank."""
    group = parallel_state.get_expert_model_parallel_group()
    rank = group.rank() if expert_rank is None else expert_rank
    experts_before = (inner.config.num_moe_experts or 0) // group.size() * rank
    layers = inner.decoder.layers
    # number of layers of earlier stages; Megatron counts from 1
    before = layers[0].layer_number - 1 if len(layers) else 0
    if name == _TIED[0] and inner.share_embeddings_and_output_weights:
        name = _TIED[1]
    name = _LAYER.sub(lambda m: f"{m[1]}{int(m[2]) + before}", name)
    name = _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + experts_before}", name)
    return stored_name(name)


def find_row(inner: Part, name: str, expert_rank: int | None = None) -> tuple[Row, tuple[str, ...]]:
    """Returns the row of the family's table for the parameter `name` of `inner`, and its HF names. `expert_rank` is as
    in `whole_model_name`."""
    family = family_for(inner.hf_config)
    name = whole_model_name(inner, name, expert_rank)
    if inner.mtp_process:
        first = family.first_prediction(inner.hf_config)
        name = _PREDICTION.sub(lambda m: f"{m[1]}{int(m[2]) + first}", name)
    return family.find(name)


def freeze(parts: Sequence[nn.Module], config: Config) -> None:
    """Turns gradients off for the parameters that the run does not train. Collective. Call it before the data-parallel
    wrapper, which has buffers only for the other parameters. A value head is always trained.

    Raises ValueError for a list that does not fit the model, or if a rank has no parameter to train.
    """
    selection = Selection.of(config)
    if not selection:
        return
    mine = {
        whole_model_name(part, name): parameter
        for part in parts
        for name, parameter in part.named_parameters()
    }
    of_ranks: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(mine))
    every = dict.fromkeys(name for names in of_ranks for name in names)
    if VALUE_HEAD not in every and not config.lora.lora_rank:  # a critic may lack listed parameters
        selection.check(every)
    for rank, names in enumerate(of_ranks):
        if not any(name == VALUE_HEAD or selection.trains(name) for name in names):
            flags = (
                spelled("lora_rank") if config.lora.lora_rank else f"{spelled(ONLY)} and {spelled(FROZEN)}"
            )
            raise ValueError(
                f"{flags} must leave a trained parameter on every "
                f"rank, got none on rank {rank}; lower --pipeline-model-parallel-size"
            )
    for name, parameter in mine.items():
        parameter.requires_grad_(name == VALUE_HEAD or selection.trains(name))
    for part in parts:
        for embedding in _frozen_embeddings(part):
            embedding.register_forward_hook(_with_gradient)


def _frozen_embeddings(part: Part) -> Iterator[nn.Module]:
    if part.pre_process and not any(p.requires_grad for p in part.embedding.parameters()):
        yield part.embedding


def _with_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Makes the output require a gradient, because recomputed layers and pipeline stages send gradients to their
    input."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
