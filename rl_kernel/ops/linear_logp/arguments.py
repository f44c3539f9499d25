"""The record of a call of `linear_logp` or `linear_token_loss`, and the checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import check_tensor, invalid
from rl_kernel.dispatch import float64_refusal
from rl_kernel.kept import KeptTokens, check_kept
from rl_kernel.ops.linear_logp.plan import WORKSPACE_BYTES
from rl_kernel.token_ids import check_ids
from rl_kernel.vocab import VocabShard, check_cap, check_targets, check_temperature, make_shard, take

LOGITS_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Task:
    """The computation that one call requests from a layer (hidden, weight, bias). It holds all inputs without a
    gradient.

    `targets` [N] integer token ids. `temperature`: a positive number, or [N]. `keep`: the ids that top-p or top-k
    sampling kept. `rounding`: the dtype that logits are rounded to, None for no rounding. `cap`: the soft cap of the
    logits, or None. `ids` [N, K]: other tokens whose log-probs are returned. `top`: number of largest log-probs that
    are returned, without gradient.
    """

    targets: Tensor
    temperature: float | Tensor
    keep: KeptTokens | None
    shard: VocabShard
    rounding: torch.dtype | None
    with_entropy: bool = False
    workspace_bytes: int = WORKSPACE_BYTES
    cap: float | None = None
    ids: Tensor | None = None
    top: int = 0

    def rows(self, rows: slice) -> Task:
        """Returns the task of the tokens in `rows`."""
        return replace(
            self,
            targets=self.targets[rows],
            temperature=take(self.temperature, rows),
            keep=take(self.keep, rows),
            ids=take(self.ids, rows),
        )


def checked_task(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float | Tensor,
    tp_group: ProcessGroup | None,
    vocab_start: int,
    vocab_size: int | None,
    keep_mask: KeptTokens | None,
    with_entropy: bool,
    logits_dtype: str | None,
    workspace_bytes: int,
    logit_cap: float | None,
    logit_scale: float,
    ids: Tensor | None = None,
) -> Task:
    """Returns the task of a call, after all checks of its arguments. A ValueError names the wrong argument.

    The scale follows the cap, so that the scale becomes a part of the temperature.
    """
    check_tensor("hidden", hidden, ["N", "H"])
    tokens, width = hidden.shape
    check_tensor("weight", weight, ["V_local", width], device=hidden.device)
    if bias is not None:
        check_tensor("bias", bias, [len(weight)], device=hidden.device)
    check_targets(targets, tokens, hidden.device)
    check_temperature(temperature, tokens, hidden.device)
    shard = make_shard("weight", len(weight), targets, vocab_start, vocab_size, tp_group)
    check_kept(keep_mask, targets, shard.limit)
    check_ids(ids, tokens, hidden.device, shard.limit)
    if ids is not None and keep_mask is not None:
        todo = "the log-probs of ids are over the whole vocabulary, and no operator computes both"
        raise invalid("keep_mask", "be left out with ids", "both", todo)
    if workspace_bytes <= 0:
        raise invalid("workspace_bytes", "be > 0", workspace_bytes, "leave it out for 1.5 GiB")
    rounding = logits_rounding(logits_dtype, weight)
    check_cap(logit_cap, logit_scale)
    scaled = temperature if logit_scale == 1 else temperature / logit_scale
    return Task(targets, scaled, keep_mask, shard, rounding, with_entropy, workspace_bytes, logit_cap, ids)


def logits_rounding(logits_dtype: str | None, weight: Tensor) -> torch.dtype | None:
    """Returns the dtype that logits are rounded to, or None for no rounding."""
    if logits_dtype is None:
        return weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else None
    if logits_dtype not in LOGITS_DTYPES:
        todo = "take the dtype that the rollout engine samples from"
        raise invalid("logits_dtype", "be 'float32', 'bfloat16' or None", repr(logits_dtype), todo)
    return LOGITS_DTYPES[logits_dtype]


def layer_refusal(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Returns the reason why the kernels cannot take this layer, or None if they can."""
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        return "hidden, weight and bias have different dtypes"
    return float64_refusal(hidden, weight, bias)
