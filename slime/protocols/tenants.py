"""This module defines the interfaces of training as a service: several adapters over one base, each with one owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

TenantLoss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
TENANT_LOSSES: tuple[str, ...] = get_args(TenantLoss)

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TenantSpec:
    """The shape of an adapter, and the seed of its first values. `alpha` is the scale times the rank."""

    rank: int
    alpha: float = 32.0
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True)
class TenantDatum:
    """One sequence of a pass. Position i in an input belongs to the prediction after `tokens[i]`."""

    tokens: list[int]
    inputs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """target_tokens and weights for cross_entropy; target_tokens, logprobs and advantages for the other losses, and
    sequence_ratio_mask for gspo. Each has one value per token. A clip threshold may have one value per token instead
    of the value in `LossSpec.config`."""


@dataclass(frozen=True)
class LossSpec:
    """The loss of a pass. Losses are sums over tokens, not means."""

    name: TenantLoss
    config: Mapping[str, float] = field(default_factory=dict)
    """clip_low_threshold and clip_high_threshold for ppo, cispo and gspo, beta for dro."""


@dataclass(frozen=True)
class PassResult:
    """The result of a forward or a forward_backward."""

    outputs: list[dict[str, list[float]]]
    """Per datum: logprobs (of target_tokens), and elementwise_loss for cross_entropy."""
    metrics: dict[str, float]
    """Names end in the reduction over several passes, such as loss:sum."""


@dataclass(frozen=True)
class AdamParams:
    """An optimizer step's parameters. A `grad_clip_norm` of 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class TenantSampling:
    """The sampling parameters of one response."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    """If True, the model's own end-of-text token does not end the response."""


@dataclass(frozen=True)
class SampledTokens:
    """One sampled response. It includes the token or the text that stopped it."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    top: list[list[tuple[int, float]]] | None = None
    """The most likely tokens with their log-probs per sampled token, if they were requested."""


@dataclass(frozen=True)
class SampledPrompt:
    """The result of a sample request: its responses, and the prompt's log-probs if they were requested."""

    sequences: list[SampledTokens]
    prompt_logprobs: list[float | None] | None = None
    """One value per prompt token. The first is None."""
    prompt_top: list[list[tuple[int, float]] | None] | None = None


class TenantTrainer(Protocol):
    """Trains several adapters over one base. Calls come from one thread, one after another.

    A user's mistake (data that the loss cannot use, a rank that is too large) is a ValueError. It leaves the adapter's
    state as it was.
    """

    def add(self, name: str, spec: TenantSpec) -> None:
        """Adds an adapter with the first values of its seed."""
        ...

    def remove(self, name: str) -> None: ...

    def forward(self, name: str, data: Sequence[TenantDatum], loss: LossSpec) -> PassResult: ...

    def forward_backward(self, name: str, data: Sequence[TenantDatum], loss: LossSpec) -> PassResult:
        """Adds the gradients of the loss to the adapter's gradients. `optim_step` uses and clears them."""
        ...

    def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        """Returns the step's metrics. Without gradients since the last step, gradients are zero."""
        ...

    def save_state(self, name: str, folder: Path, optimizer: bool) -> None:
        """Writes the adapter, and with `optimizer` the state of Adam, into an empty folder."""
        ...

    def load_state(self, name: str, folder: Path, optimizer: bool) -> None:
        """Replaces the adapter's values. Without `optimizer`, Adam starts new. Gradients are cleared."""
        ...

    def export_peft(self, name: str, folder: Path) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, which a sampler and PEFT load."""
        ...


class TenantSampler(Protocol):
    """Samples from the base and from exported adapters. Calls come from one event loop."""

    async def load(self, adapter: str, folder: Path) -> None: ...

    async def unload(self, adapter: str) -> None: ...

    async def sample(
        self,
        adapter: str | None,
        prompt: list[int],
        params: TenantSampling,
        n: int = 1,
        prompt_logprobs: bool = False,
        top_k_prompt: int = 0,
        top_k_sample: int = 0,
    ) -> SampledPrompt:
        """Samples `n` responses. None is the base."""
        ...
