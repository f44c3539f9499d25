"""The trainer's log-probs, gradients and weights of a checkpoint, on the ranks that this process group has.

Each token's target is the next one, and the first token follows the last one, so every token has a log-prob.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rl_kernel
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import (
    build_model,
    compute_logits,
    gather_hidden,
    logit_cap,
    output_weight,
    stage_output,
    unwrap,
    vocab_range,
)
from slime.megatron_backend.model.optimizer import finish_grads
from slime.megatron_backend.parallel import ParallelInfo
from slime.protocols import WeightUpdate
from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import Slice, whole_slices

STEP = 0.01
"""Length of the step of plain gradient descent between two versions."""


@dataclass(frozen=True)
class Computed:
    """A rank's numbers. Tensors have the names of files."""

    weights: dict[str, Tensor]
    log_probs: Tensor | None = None
    """One per token, in the order in which the rank has its sequences."""
    gradients: dict[str, Tensor] = field(default_factory=dict)


def shift_tokens(batch: Sequence[Tensor]) -> Tensor:
    """Returns a batch's targets, one per token."""
    return torch.cat([tokens.roll(-1) for tokens in batch])


def compute_hidden(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Returns the hidden states of packed sequences."""
    device = output_weight(model).device
    layout = packed_layout(token_slice([len(tokens) for tokens in batch]), device)
    return gather_hidden(model, stage_output(model, torch.cat(list(batch)).to(device), layout))


def compute_log_probs(model: nn.Module, batch: Sequence[Tensor], info: ParallelInfo) -> Tensor:
    """Returns the log-probs of `shift_tokens`, from a vocabulary that tensor-parallel ranks may share."""
    start, size = vocab_range(model)
    log_probs = rl_kernel.linear_logp(
        compute_hidden(model, batch),
        output_weight(model),
        shift_tokens(batch),
        vocab_start=start,
        vocab_size=size,
        logit_cap=logit_cap(model),
        tp_group=info.tp_group if info.tp_size > 1 else None,
    )
    assert isinstance(log_probs, Tensor)
    return log_probs


def store_gradients(model: nn.Module) -> None:
    """Replaces each parameter by its gradient, so that an export lists gradients. The gradient of a frozen parameter is
    0."""
    for parameter in unwrap(model).parameters():
        held: Any = parameter  # the buffer is Megatron's
        parameter.data = held.main_grad.clone() if parameter.requires_grad else torch.zeros_like(parameter)


def compute_model(
    folder: Path, config: Config, info: ParallelInfo, batch: Sequence[Tensor], *, gradients: bool = True
) -> Computed:
    """Loads a checkpoint and computes log-probs for this rank's sequences, and the gradients of the summed
    log-probs with the sign changed, divided by the tokens of `batch`. A pipeline stage has weights only; use
    `gradients=False`."""
    model = build_model(read_hf_config(folder), config)
    load_hf(model, folder)
    weights = {name: tensor.clone() for name, tensor in export_hf(model)}
    if not gradients:
        return Computed(weights)
    log_probs = compute_log_probs(model, batch[info.dp_rank :: info.dp_size], info)
    (-log_probs.sum() / sum(map(len, batch))).backward()
    finish_grads(model)
    store_gradients(model)
    return Computed(weights, log_probs.detach(), {name: tensor.clone() for name, tensor in export_hf(model)})


def publish_versions(
    folder: Path,
    config: Config,
    channel: FileChannel,
    tokens: Tensor,
    *,
    checksums: bool = True,
    export: Callable[[nn.Module, int], Iterable[Slice]] = lambda model, version: whole_slices(
        export_hf(model)
    ),
) -> list[tuple[Tensor, WeightUpdate]]:
    """Returns the log-probs of `tokens` after the first, with the update that has the weights: of the checkpoint, and
    after a step of gradient descent. `export` makes the slices of a version."""
    hf = read_hf_config(folder)
    model = build_model(hf, config)
    load_hf(model, folder)
    layout = packed_layout(token_slice([len(tokens)]), tokens.device)
    made = []
    for version in (0, 1):
        logits = compute_logits(model, stage_output(model, tokens, layout))[:-1, : hf["vocab_size"]].float()
        values = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        update = channel.publish(export(model, version), version, checksums=checksums)
        made.append((values.detach().cpu(), update))
        values.sum().backward()
        take_step(model)
    return made


def take_step(model: nn.Module) -> None:
    """Makes a step of plain gradient descent, which raises the sum of log-probs."""
    for parameter in unwrap(model).parameters():
        if parameter.requires_grad:  # the indexer of sparse attention is frozen
            held: Any = parameter  # the buffer is Megatron's
            parameter.data.add_(STEP * held.main_grad)
