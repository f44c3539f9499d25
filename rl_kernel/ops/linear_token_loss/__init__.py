"""`linear_token_loss`: a token-wise loss of hidden states in one pass, three matrix products and no logits kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import check_tensor
from rl_kernel.dispatch import choose
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.arguments import check_layer, check_workspace, layer_refusal, logits_rounding
from rl_kernel.ops.linear_logp.plan import WORKSPACE_BYTES
from rl_kernel.ops.linear_token_loss.reference import linear_token_loss_reference
from rl_kernel.telemetry import record, timed

TokenLoss = Callable[[Tensor, Tensor | None, slice], tuple[Tensor, dict[str, Tensor]]]
"""(log_probs [C], entropy [C] or None, rows) -> (sum of the losses of these tokens, metrics of [C] each)."""


class TokenLossResult(NamedTuple):
    """`loss` float32 scalar, differentiable; log_probs [N], entropy [N] (None unless asked for) and metrics [N] each
    are detached."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLoss,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    keep_mask: KeptTokens | None = None,
    return_entropy: bool = False,
    logits_dtype: str | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    weight_grad: Tensor | None = None,
    impl: str | None = None,
) -> TokenLossResult:
    """Loss of the log-probs and entropy of `linear_logp`, with its gradient taken while the logits are live.

    `log_probs, entropy = linear_logp(hidden, weight, targets, return_entropy=True, ...)`;
    `loss, metrics = token_loss(log_probs, entropy, slice(0, N))`.

    Args:
        token_loss: called once for each block of tokens, in order; `rows` are the tokens of the block. The loss must
            be a sum over tokens, each depending on its own log-prob and entropy only (denominators are constants),
            computed in PyTorch or by operators with a gradient; metrics are tensors of [C].
        weight_grad: [V_local, H] float32 buffer (Megatron's `main_grad`) that the gradient of `weight` is added to in
            this call, for an upstream gradient of 1: scale inside `token_loss`. Autograd then receives none for it.
        return_entropy: compute the entropy; else `token_loss` gets None.
        The others: see `linear_logp`, and its module for collectives, synchronisation and determinism.

    Returns:
        TokenLossResult. Backward hands over the gradients, which are computed by then, times the upstream scalar, once.

    Raises:
        As `linear_logp`; ValueError: `weight_grad` of another shape, dtype or device. RuntimeError: a second backward.

    `workspace_bytes` decides how many tokens go through at a time. If they are not all and there is no `weight_grad`,
    the weight gradient is summed in a float32 buffer of its size where the workspace holds one; else all tokens go
    at once, and tiles that do not fit are computed twice. Collectives are per block.
    """
    shard = check_layer(
        hidden, weight, targets, temperature, tp_group, vocab_start, vocab_size, bias, keep_mask
    )
    check_workspace(workspace_bytes)
    if weight_grad is not None:
        check_tensor("weight_grad", weight_grad, weight.shape, (torch.float32,), device=weight.device)
    settings = targets, temperature, keep_mask, shard, logits_rounding(logits_dtype, weight)
    choice = choose("linear_token_loss", hidden.device, impl, layer_refusal(hidden, weight, bias))
    record(choice, len(hidden))
    call = hidden, weight, bias, settings, token_loss
    with timed("linear_token_loss", hidden.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.linear_token_loss.autograd import linear_token_loss_on_device as run

            parts = run(*call, workspace_bytes, return_entropy, weight_grad)
        else:
            parts = linear_token_loss_reference(*call, return_entropy, weight_grad)
    return TokenLossResult(*parts)
