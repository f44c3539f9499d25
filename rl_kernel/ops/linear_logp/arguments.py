"""The arguments that `linear_logp` and `linear_token_loss` share: their checks and what follows from them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import check_tensor, invalid
from rl_kernel.dispatch import float64_refusal
from rl_kernel.kept import KeptTokens, check_kept
from rl_kernel.vocab import VocabShard, check_targets, check_temperature, make_shard

LOGITS_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def check_layer(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    tp_group: ProcessGroup | None,
    vocab_start: int,
    vocab_size: int | None,
    bias: Tensor | None,
    keep_mask: KeptTokens | None,
) -> VocabShard:
    """The vocabulary shard of this process, after all checks of the inputs."""
    check_tensor("hidden", hidden, ["N", "H"])
    tokens, width = hidden.shape
    check_tensor("weight", weight, ["V_local", width], device=hidden.device)
    if bias is not None:
        check_tensor("bias", bias, [len(weight)], device=hidden.device)
    check_targets(targets, tokens, hidden.device)
    check_temperature(temperature, tokens, hidden.device)
    shard = make_shard("weight", len(weight), targets, vocab_start, vocab_size, tp_group)
    check_kept(keep_mask, targets, shard.limit)
    return shard


def logits_rounding(logits_dtype: str | None, weight: Tensor) -> torch.dtype | None:
    """The dtype that logits are rounded to; None for not at all."""
    if logits_dtype is None:
        return weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else None
    if logits_dtype not in LOGITS_DTYPES:
        todo = "take the dtype that the rollout engine samples from"
        raise invalid("logits_dtype", "be 'float32', 'bfloat16' or None", repr(logits_dtype), todo)
    return LOGITS_DTYPES[logits_dtype]


def check_workspace(workspace_bytes: int) -> None:
    """A positive number of bytes."""
    if workspace_bytes <= 0:
        raise invalid("workspace_bytes", "be > 0", workspace_bytes, "leave it out for 1.5 GiB")


def layer_refusal(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the kernels cannot take this layer; None if they can."""
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        return "hidden, weight and bias have different dtypes"
    return float64_refusal(hidden, weight, bias)
