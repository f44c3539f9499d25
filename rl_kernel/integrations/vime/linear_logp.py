"""`provider` offers `linear_logp` and `logp` through upstream vime's interface for selected log-probs.

    --selected-logprob-provider rl_kernel.integrations.vime.linear_logp.provider

A request is any object with the field names of upstream's record, so that this module does not import upstream. Shapes:
T rows, V_local vocabulary columns of this tensor-parallel rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.checks import FLOATS, INTEGERS, dtype_name
from rl_kernel.contract import contract_id
from rl_kernel.dispatch import Choice, Refused, choose, float64_refusal
from rl_kernel.ops.linear_logp import linear_logp
from rl_kernel.ops.linear_logp.arguments import layer_refusal
from rl_kernel.ops.logp import logp


class Request(Protocol):
    """Fields that this module reads from upstream's SelectedLogprobRequest, whose docstrings describe them. Older
    records lack `hidden` and all fields after it."""

    logits: Tensor
    target_ids: Tensor
    tensor_parallel_group: dist.ProcessGroup | None
    with_entropy: bool
    with_entropy_grad: bool
    log_prob_keep_mask: Tensor | None


@dataclass(frozen=True)
class Selected:
    """The result, with the field names of upstream's SelectedLogprobResult: log-probs [T, 1] and entropy [T] or None,
    in nats, float32 (float64 for float64 inputs)."""

    selected_logprobs: Tensor
    entropy: Tensor | None
    backend_id: str
    contract_id: str
    provenance: Mapping[str, object]


class Unavailable(RuntimeError):
    """Raised if the operators cannot serve a request. Upstream's mode auto then runs its own computation."""

    selected_logprob_provider_unavailable = True


@dataclass(frozen=True)
class OutputLayer:
    """The inputs of `logits = (hidden @ weight.T + bias) / temperature`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float | Tensor


def provider(request: Request) -> Selected:
    """Returns `log_softmax(logits, -1).gather(1, target_ids[:, None])` [T, 1] and, if requested, the entropy [T].

    With `hidden`, `lm_head_weight` and `temperature` the operator is `linear_logp`, and the logits are not read.
    `linear_logp` rounds logits to the dtype of the weight and returns the gradient of `hidden` summed over the group.
    The operator is `logp` on the logits in three cases: one of the three fields is missing, the request has a keep
    mask, or the logits need a gradient and `hidden` does not. The softmax covers the columns of all ranks of
    `tensor_parallel_group`, without ids from `real_vocab_size` on. Collectives and determinism are those of the
    operator.

    Raises:
        Unavailable: the operators do not take a dtype or the group, or rl_kernel is in strict mode and the kernels
            cannot run.
        ValueError: a shape, shard, target or temperature is wrong; see the operator.
    """
    layer = _layer(request)
    _check_served(request, layer)
    group = request.tensor_parallel_group
    group = group if group is not None and dist.get_world_size(group) > 1 else None
    try:
        choice = _choice(request, layer)
        log_probs, entropy = _by_logits(request, group) if layer is None else _by_layer(request, layer, group)
    except Refused as error:
        raise Unavailable(f"rl_kernel is in mode strict, and {error}") from error
    if entropy is not None and not request.with_entropy_grad:
        entropy = entropy.detach()
    return Selected(
        log_probs[:, None],
        entropy,
        backend_id=f"rl_kernel.{choice.operator}.{choice.implementation}",
        contract_id=contract_id(choice.operator),
        provenance={
            "operator": choice.operator,
            "implementation": choice.implementation,
            "reason": choice.reason,
            "inputs": "logits" if layer is None else "hidden states and weight",
            "device": str(request.logits.device),
            "tensor_parallel_size": 1 if group is None else dist.get_world_size(group),
            "torch": str(torch.__version__),
        },
    )


def _layer(request: Request) -> OutputLayer | None:
    """Returns the layer of a request, or None if the logits must be read."""
    hidden, weight = getattr(request, "hidden", None), getattr(request, "lm_head_weight", None)
    temperature = getattr(request, "temperature", None)
    if hidden is None or weight is None or temperature is None or request.log_prob_keep_mask is not None:
        return None
    if request.logits.requires_grad and not hidden.requires_grad:
        return None
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1).expand(len(hidden))
    return OutputLayer(hidden, weight, getattr(request, "lm_head_bias", None), temperature)


def _check_served(request: Request, layer: OutputLayer | None) -> None:
    group, ids = request.tensor_parallel_group, request.target_ids.dtype
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise Unavailable(
            f"tensor_parallel_group must be a group of torch.distributed, got {type(group).__name__}; "
            "give the tensor-parallel group, or None for one rank"
        )
    if ids not in INTEGERS:
        raise Unavailable(f"target_ids must be int64 or int32, got {dtype_name(ids)}; give them as int64")
    inputs = {"logits": request.logits}
    if layer is not None:
        inputs = {"hidden": layer.hidden, "lm_head_weight": layer.weight}
    for name, value in inputs.items():
        if value.dtype not in FLOATS:
            wanted = ", ".join(dtype_name(dtype) for dtype in FLOATS)
            raise Unavailable(f"{name} must be one of {wanted}, got {dtype_name(value.dtype)}; convert it")


def _choice(request: Request, layer: OutputLayer | None) -> Choice:
    """Returns the implementation that the operator will run."""
    if layer is None:
        return choose("logp", request.logits.device, refusal=float64_refusal(request.logits))
    refusal = layer_refusal(layer.hidden, layer.weight, layer.bias)
    return choose("linear_logp", layer.hidden.device, refusal=refusal)


def _by_layer(
    request: Request, layer: OutputLayer, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor | None]:
    out = linear_logp(
        layer.hidden,
        layer.weight,
        request.target_ids,
        bias=layer.bias,
        temperature=layer.temperature,
        tp_group=group,
        vocab_start=_start(request, group),
        vocab_size=getattr(request, "real_vocab_size", None),
        return_entropy=request.with_entropy,
    )
    return (out, None) if isinstance(out, Tensor) else (out[0], out[1])


def _by_logits(request: Request, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor | None]:
    start, size = _start(request, group), getattr(request, "real_vocab_size", None)

    def compute(logits: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        out = logp(
            logits,
            request.target_ids,
            tp_group=group,
            vocab_start=start,
            vocab_size=size,
            return_entropy=with_entropy,
        )
        return (out, None) if isinstance(out, Tensor) else out

    if request.log_prob_keep_mask is None:
        return compute(request.logits, request.with_entropy)
    masked = request.logits.masked_fill(~request.log_prob_keep_mask.bool(), -torch.inf)
    # The entropy covers all columns, so it needs a second call.
    return compute(masked, False)[0], compute(request.logits, True)[1] if request.with_entropy else None


def _start(request: Request, group: dist.ProcessGroup | None) -> int:
    """Returns the id of this rank's first column. Without the vocabulary's size in the request, all shards have equal
    size."""
    if group is None:
        return 0
    if getattr(request, "global_vocab_size", None) is not None:
        return int(getattr(request, "vocab_start_index", 0))
    return dist.get_rank(group) * request.logits.shape[1]
