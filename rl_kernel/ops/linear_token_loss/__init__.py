"""`linear_token_loss`: a loss per token from hidden states in one pass, with three matrix products and without kept
logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import check_tensor
from rl_kernel.dispatch import choose
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.arguments import checked_task, layer_refusal
from rl_kernel.ops.linear_logp.plan import WORKSPACE_BYTES
from rl_kernel.ops.linear_token_loss.reference import TokenLoss, TokenLossResult, linear_token_loss_reference
from rl_kernel.telemetry import record, timed


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
    ids: Tensor | None = None,
    return_entropy: bool = False,
    logits_dtype: str | None = None,
    logit_cap: float | None = None,
    logit_scale: float = 1.0,
    workspace_bytes: int = WORKSPACE_BYTES,
    weight_grad: Tensor | None = None,
    impl: str | None = None,
) -> TokenLossResult:
    """Returns a loss of the outputs of `linear_logp`. The call also computes the gradient, from the same logits.

    `log_probs, entropy = linear_logp(hidden, weight, targets, return_entropy=True, ...)`;
    `loss, metrics = token_loss(log_probs, entropy, slice(0, N))`.

    Args:
        token_loss: called once for each block of tokens, in order; `rows` are the tokens of the block. The loss must
            be a sum over tokens, and the term of a token may depend on its own log-probs and entropy only (denominators
            are constants). It is computed in PyTorch or by operators with a gradient. Metrics are tensors of [C].
        weight_grad: [V_local, H] float32 buffer (Megatron's `main_grad`). This call adds the gradient of `weight` to
            it, for an upstream gradient of 1: scale inside `token_loss`. Autograd then gets no gradient of `weight`.
        return_entropy: compute the entropy; otherwise `token_loss` gets None. ids: their log-probs [C, K] come last.
        The other arguments: see `linear_logp`. Its module lists collectives, synchronisation and determinism.

    Returns:
        TokenLossResult. The backward returns the gradients that the call computed, times the upstream scalar, once.

    Raises:
        As `linear_logp`; ValueError: `weight_grad` of another shape, dtype or device. RuntimeError: a second backward.

    `workspace_bytes` sets the number of tokens per block. If one block does not hold all tokens and `weight_grad` is
    None, a float32 buffer sums the weight gradient, if the workspace has room for this buffer. Otherwise one block
    holds all tokens, and tiles that do not fit are computed twice. Each block runs its own collectives.
    """
    task = checked_task(
        hidden, weight, bias, targets, temperature=temperature, tp_group=tp_group, vocab_start=vocab_start,
        vocab_size=vocab_size, keep_mask=keep_mask, with_entropy=return_entropy, logits_dtype=logits_dtype,
        workspace_bytes=workspace_bytes, logit_cap=logit_cap, logit_scale=logit_scale, ids=ids,
    )  # fmt: skip
    if weight_grad is not None:
        check_tensor("weight_grad", weight_grad, weight.shape, (torch.float32,), device=weight.device)
    choice = choose("linear_token_loss", hidden.device, impl, layer_refusal(hidden, weight, bias))
    record(choice, len(hidden))
    with timed("linear_token_loss", hidden.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.linear_token_loss.autograd import linear_token_loss_on_device

            return linear_token_loss_on_device(hidden, weight, bias, task, token_loss, weight_grad)
        return linear_token_loss_reference(hidden, weight, bias, task, token_loss, weight_grad)
