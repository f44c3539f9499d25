"""The heads of a model by kind: `slime.operators` chooses a kind, and `lm_head` builds its class."""

from __future__ import annotations

from torch import nn

from slime import operators
from slime.algo.losses import loss_for
from slime.config import Config
from slime.config.sections.kernels import KernelsConfig
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.heads.bitwise import BitwiseHead, BitwiseOnePassHead
from slime.megatron_backend.step.heads.head import (
    LinearHead,
    LmHead,
    LogitsHead,
    NativeHead,
    OnePassHead,
    ValueTokens,
)
from slime.megatron_backend.step.heads.provider import ProviderHead

_CLASSES: dict[operators.Head, type[LmHead]] = {
    head.kind: head
    for head in (
        *(OnePassHead, LinearHead, LogitsHead, NativeHead, ValueTokens, ProviderHead),
        *(BitwiseHead, BitwiseOnePassHead),
    )
}


def lm_head(
    kind: operators.Head, model: nn.Module, ranks: ParallelInfo, kernels: KernelsConfig, *, temperature: float
) -> LmHead:
    """Returns the head of `model` with the given kind. `temperature` divides the logits. `kernels` bounds the memory of
    the kinds without logits, and names the provider of the kind that has one."""
    return _CLASSES[kind](model, ranks, kernels, temperature=temperature)


def build_head(config: Config, kind: operators.Head, model: nn.Module, ranks: ParallelInfo) -> LmHead:
    """Returns the head of `model` with the temperature and the flags of a run."""
    return lm_head(kind, model, ranks, config.kernels, temperature=get_temperature(config))


def get_temperature(config: Config) -> float:
    """Returns the divisor of the logits: the engine samples from logits divided by it. It is 1 for given responses."""
    return config.rollout.rollout_temperature if loss_for(config.algorithm).rewarded else 1.0
