"""The provider of selected log-probs: a user's function that replaces the trainer's own log-probs and entropy.

This file owns request and result of a call, with upstream vime's names, their checks, and the rule for a provider that
is not available. A provider reduces over tensor-parallel ranks. It never reduces over context-parallel ranks, because
the trainer owns the order of rows, slices and losses.

Shapes: T rows of this context-parallel rank, V_local vocabulary columns of this tensor-parallel rank, H hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.config.schema import read_section
from slime.config.sections.kernels import KernelsConfig
from slime.hooks import Hook, MissingHookError, load_function
from slime.records.once import warn_once

logger = logging.getLogger(__name__)

FLAG = "--selected-logprob-provider"
MODES = ("auto", "strict")
LAYOUTS = ("single", "zigzag", "allgather")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class SelectedLogprobProviderUnavailable(RuntimeError):
    """A provider raises this error if it cannot serve a request. With --selected-logprob-provider-mode auto, the
    trainer's own computation runs instead. An error of another class with a true attribute
    `selected_logprob_provider_unavailable` has the same meaning."""


def _must(name: str, rule: str, got: object, todo: str) -> ValueError:
    return ValueError(f"{name} must {rule}, got {got}; {todo}")


@dataclass(frozen=True)
class ContextParallelLayout:
    """The part of a packed row that this rank has. `layout` is "single" exactly if `world_size` is 1."""

    world_size: int
    rank: int
    layout: Literal["single", "zigzag", "allgather"]

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            got = f"rank {self.rank} of {self.world_size}"
            raise _must("rank", "lie in [0, world_size)", got, "give the context-parallel group's")
        if self.layout not in LAYOUTS:
            raise _must("layout", f"be one of {', '.join(LAYOUTS)}", repr(self.layout), "check the spelling")
        if (self.world_size == 1) != (self.layout == "single"):
            got = f"{self.layout} for {self.world_size} ranks"
            raise _must(
                "layout", "be single exactly for one rank", got, "several ranks have zigzag or allgather"
            )


@dataclass(frozen=True)
class SelectedLogprobRequest:
    """The inputs of a provider.

    `logits` [T, V_local] are divided by the temperature already. `target_ids` [T] are ids of the whole vocabulary.
    `log_prob_keep_mask` [T, V_local] bool is true for each column that sampling kept. The softmax of the log-prob is
    over these columns, that of the entropy is over all columns. `with_entropy_grad` is true if a loss uses the entropy.
    `chunk_size` is the number of rows per part, or -1 for no limit.

    `hidden` [T, H] and `lm_head_weight` [V_local, H] are both present or both None. They are the inputs of `logits =
    hidden @ lm_head_weight.T / temperature`, with `lm_head_bias` [V_local] for a head with a bias. `hidden` is equal on
    all tensor-parallel ranks, and its gradient must be equal, too: a provider that reads `hidden` sums the gradient
    over the group. `vocab_start_index` is the id of the first column. Ids from `real_vocab_size` on are padding.

    Raises:
        ValueError: a wrong shape, dtype, device, size or temperature.
    """

    logits: Tensor
    target_ids: Tensor
    tensor_parallel_group: ProcessGroup | None
    context_parallel: ContextParallelLayout
    with_entropy: bool
    with_entropy_grad: bool
    chunk_size: int
    log_prob_keep_mask: Tensor | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    hidden: Tensor | None = None
    lm_head_weight: Tensor | None = None
    lm_head_bias: Tensor | None = None
    vocab_start_index: int = 0
    global_vocab_size: int | None = None
    real_vocab_size: int | None = None
    temperature: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.logits.ndim != 2:
            raise _must("logits", "be [T, V_local]", list(self.logits.shape), "flatten the rows")
        rows, device = len(self.logits), self.logits.device
        _check("target_ids", self.target_ids, [rows], device)
        if self.target_ids.dtype not in INTEGERS:
            raise _must("target_ids", "be integers", self.target_ids.dtype, "give token ids")
        if self.log_prob_keep_mask is not None:
            _check("log_prob_keep_mask", self.log_prob_keep_mask, list(self.logits.shape), device)
        self._check_layer(rows, device)
        for name in ("global_vocab_size", "real_vocab_size"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or size < 1):
                raise _must(name, "be a number >= 1", size, "leave it out if it is not known")
        self._check_temperature(rows)

    def _check_layer(self, rows: int, device: torch.device) -> None:
        present = {name: getattr(self, name) for name in ("hidden", "lm_head_weight")}
        if all(value is None for value in present.values()) and self.lm_head_bias is None:
            return
        for name, value in present.items():
            if not isinstance(value, Tensor) or value.ndim != 2:
                got = "none" if value is None else list(getattr(value, "shape", [type(value).__name__]))
                raise _must(
                    name,
                    "be a matrix as the other one is",
                    got,
                    "give hidden and lm_head_weight, or neither",
                )
        hidden, weight = present["hidden"], present["lm_head_weight"]
        if len(hidden) != rows:
            raise _must("hidden rows", f"be the {rows} of logits", len(hidden), "give the same tokens")
        if hidden.shape[1] != weight.shape[1]:
            got = f"{hidden.shape[1]} and {weight.shape[1]}"
            raise _must("hidden width", "be that of lm_head_weight", got, "give the layer's input")
        _check("hidden", hidden, [rows, weight.shape[1]], device)
        _check("lm_head_weight", weight, [self.logits.shape[1], weight.shape[1]], device)
        if self.lm_head_bias is not None:
            _check("lm_head_bias", self.lm_head_bias, [len(weight)], device)

    def _check_temperature(self, rows: int) -> None:
        value = self.temperature
        if isinstance(value, Tensor) and value.numel() not in (1, rows):
            raise _must("temperature", f"have 1 or {rows} values", list(value.shape), "give one for each row")
        if value is not None and not bool((torch.as_tensor(value) > 0).all()):
            raise ValueError(f"temperature must be positive, got {value}; it divides the logits")


@dataclass(frozen=True)
class SelectedLogprobResult:
    """The result of a provider: an object or a mapping with these names.

    `selected_logprobs` [T, 1] and `entropy` [T] are floating point, in nats, and equal on all tensor-parallel ranks.
    `entropy` is None exactly if the request has no `with_entropy`. `backend_id` names the implementation, `contract_id`
    names its guarantees, and `provenance` holds any other facts.
    """

    selected_logprobs: Tensor
    entropy: Tensor | None
    backend_id: str
    contract_id: str
    provenance: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class SelectedLogprobProvider(Protocol):
    """The type of the function that --selected-logprob-provider names."""

    def __call__(self, request: SelectedLogprobRequest) -> SelectedLogprobResult: ...


Pair = tuple[Tensor, Tensor | None]
"""Log-probs [T, 1], and entropy [T] or None for a request without `with_entropy`."""


def compute_selected_logprobs(
    *, args: object, request: SelectedLogprobRequest, native: Callable[..., Pair]
) -> Pair:
    """Calls `selected_log_probs` with the flags in `args`. Plug-ins of upstream vime call this function."""
    return selected_log_probs(read_section(KernelsConfig, args), request, native)


def selected_log_probs(
    kernels: KernelsConfig, request: SelectedLogprobRequest, native: Callable[..., Pair]
) -> Pair:
    """Returns log-probs [T, 1] and entropy [T] or None, from the provider of `kernels`, otherwise from `native`.

    In mode auto, `native` runs if the provider cannot be imported or raises that it is unavailable. Every other error
    passes. `native(logits, target_ids, tensor_parallel_group, with_entropy=, with_entropy_grad=, chunk_size=,
    log_prob_keep_mask=)` returns the same pair.

    Raises:
        SelectedLogprobProviderUnavailable: mode strict, and the provider is not available.
        ValueError: an unknown mode; a result with a wrong name, shape, dtype or device; in mode strict also an empty
            identity, or a result without the gradient that the request needs.
    """
    path = (kernels.selected_logprob_provider or "").strip()
    mode = kernels.selected_logprob_provider_mode or "auto"
    if mode not in MODES:
        raise _must(f"{FLAG}-mode", f"be one of {', '.join(MODES)}", repr(mode), "check the spelling")
    if not path:
        return _by(native, request)
    try:
        result = _provider(path)(request)
    except Exception as error:  # border: a provider has its own error classes, and passes on all but one kind
        if not _unavailable(error):
            raise
        if mode == "strict":
            raise SelectedLogprobProviderUnavailable(
                f"{FLAG} {path} must be available in mode strict, but it is unavailable: {error}; use mode auto for "
                "the trainer's own log-probs there"
            ) from error
        _warn_once(f"{FLAG} {path} is unavailable, the trainer's own log-probs are used: {error}")
        return _by(native, request)
    return _checked(result, request, f"{FLAG} {path}", strict=mode == "strict")


def _provider(path: str) -> Hook:
    try:
        return load_function(path, flag=FLAG)
    except MissingHookError as error:
        raise SelectedLogprobProviderUnavailable(str(error)) from error


def _unavailable(error: Exception) -> bool:
    known = isinstance(error, SelectedLogprobProviderUnavailable)
    return known or bool(getattr(error, "selected_logprob_provider_unavailable", False))


def _by(native: Callable[..., Pair], request: SelectedLogprobRequest) -> Pair:
    return native(
        request.logits,
        request.target_ids,
        request.tensor_parallel_group,
        with_entropy=request.with_entropy,
        with_entropy_grad=request.with_entropy_grad,
        chunk_size=request.chunk_size,
        log_prob_keep_mask=request.log_prob_keep_mask,
    )


def _checked(result: object, request: SelectedLogprobRequest, who: str, *, strict: bool) -> Pair:
    """Returns the tensors of a provider's result, after all checks. `who` names the provider in errors."""
    names = SelectedLogprobResult.__dataclass_fields__
    missing = object()
    found = {
        name: result.get(name, missing) if isinstance(result, Mapping) else getattr(result, name, missing)
        for name in names
    }
    lost = [name for name, value in found.items() if value is missing]
    if lost:
        rule, todo = f"return {', '.join(names)}", "return a SelectedLogprobResult"
        raise _must(who, rule, f"{type(result).__name__} without {', '.join(lost)}", todo)
    if not isinstance(found["provenance"], Mapping):
        got = type(found["provenance"]).__name__
        raise _must(who, "return a mapping as provenance", got, "return a mapping with entries")
    rows = len(request.logits)
    log_probs = _floats(who, "selected_logprobs", found["selected_logprobs"], [rows, 1], request.logits)
    entropy = None
    if request.with_entropy:
        entropy = _floats(who, "entropy", found["entropy"], [rows], request.logits)
    elif found["entropy"] is not None:
        raise _must(who, "return no entropy where with_entropy is false", "one", "return None for it")
    identity = str(found["backend_id"] or ""), str(found["contract_id"] or "")
    if strict:
        if not all(identity):
            raise _must(who, "return a backend_id and a contract_id in mode strict", identity, "name both")
        _check_attached(who, log_probs, entropy, request)
    _warn_once(
        f"{who} is active: backend_id={identity[0]} contract_id={identity[1]}", f"{found['provenance']}"
    )
    return log_probs, entropy


def _floats(who: str, name: str, value: object, shape: list[int], like: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        raise _must(who, f"return {name} as a tensor", type(value).__name__, f"its shape is {shape}")
    if list(value.shape) != shape:
        got = f"{list(value.shape)} (invalid {name} shape)"
        raise _must(who, f"return {name} of shape {shape}", got, "return a value for each row of logits")
    if value.device != like.device:
        raise _must(who, f"return {name} on {like.device}", value.device, "compute where the logits are")
    if not value.is_floating_point():
        raise _must(who, f"return {name} in floating point", value.dtype, "return nats")
    return value


def _check_attached(
    who: str, log_probs: Tensor, entropy: Tensor | None, request: SelectedLogprobRequest
) -> None:
    needed = {"selected_logprobs": (log_probs, request.logits.requires_grad)}
    if entropy is not None:
        needed["entropy"] = entropy, request.with_entropy_grad
    for name, (value, wanted) in needed.items():
        if wanted and not value.requires_grad:
            rule = f"return {name} that autograd can follow to the logits"
            raise _must(who, rule, "a detached tensor", "compute it without .detach() and torch.no_grad()")


def _check(name: str, value: object, shape: list[int], device: torch.device) -> None:
    if not isinstance(value, Tensor) or list(value.shape) != shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise _must(name, f"have shape {shape}", got, "give values for the rows and columns of logits")
    if value.device != device:
        raise _must(name, f"be on {device}, where logits are", value.device, "move it")


def _warn_once(text: str, *more: str) -> None:
    """Logs each provider's identity once, and each reason for a fallback once."""
    warn_once(logger, text, "%s", " ".join((text, *more)))
