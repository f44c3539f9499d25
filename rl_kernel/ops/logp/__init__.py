"""`logp`: log-probabilities and entropy from materialised logits (custom losses, audits)."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from rl_kernel.checks import check_tensor, compute_dtype, invalid
from rl_kernel.dispatch import choose, float64_refusal
from rl_kernel.kept import KeptTokens, check_kept
from rl_kernel.ops.logp import reference
from rl_kernel.telemetry import record, timed
from rl_kernel.vocab import check_cap, check_targets, check_temperature, make_shard, usable_temperature


def logp(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    keep_mask: KeptTokens | None = None,
    return_entropy: bool = False,
    logit_cap: float | None = None,
    logit_scale: float = 1.0,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns each target's log-probability and, if requested, the entropy of the distribution, in nats.

    `log_p = log_softmax(logits[:, :vocab_size].float() / temperature[:, None], -1)`;
    `log_p.gather(1, targets[:, None])[:, 0]` and `-(log_p.exp() * log_p).sum(-1)`. The softmax and all sums are in
    float32, for every dtype of the logits.

    Args:
        logits: [N, V_local] float32, bfloat16, float16 or float64 (the reference computes float64 in float64, for
            derivative checks), any strides; N may be 0. Columns of -inf have probability 0.
        targets: [N] int64 or int32 token ids of the whole vocabulary.
        temperature: number or [N], > 0; a constant.
        tp_group: its ranks' columns partition the vocabulary. All other arguments and upstream gradients are equal.
        vocab_start: id of the first column.
        vocab_size: ids from this number on are padding: no probability, zero gradient; also for a whole shard.
        keep_mask: the ids that sampling kept for each token, for the softmax of the log-prob (not of the entropy).
        return_entropy: also return the entropy. The entropy costs a gradient only if a loss uses it.
        logit_cap, logit_scale: as in linear_logp, in the logits' dtype; columns of -inf become -cap.
        inplace_backward: the backward overwrites `logits` with their gradient. No code may read the logits
            afterwards, and a second backward is an error.
        impl: "reference" or "triton" overrides the mode; for tests.

    Returns:
        log_probs [N] float32 (float64 for float64 logits), or (log_probs, entropy), equal on all ranks of
        `tp_group`; differentiable once in the logits, whose gradient has their dtype.

    Raises:
        ValueError: a wrong shape, dtype, device, temperature, cap, shard, target or kept id, or a target not kept.

    On a device, values of tensors are read in strict mode only. In the other modes, a bad target or temperature gives
    NaN and a target not kept gives -inf. Only the first call with a layout of shards waits for the device.

    Memory: the gradient, unless in place; with `keep_mask` up to 64 bytes per id. Under `tp_group` one all-gather of
    [3 to 7, N] in the forward. Can be captured in a CUDA graph. The same inputs give the same bits.
    """
    _check_inputs(logits, targets, temperature, inplace_backward)
    shard = make_shard("logits", logits.shape[1], targets, vocab_start, vocab_size, tp_group)
    check_kept(keep_mask, targets, shard.limit)
    check_cap(logit_cap, logit_scale)
    usable = usable_temperature(temperature / logit_scale, compute_dtype(logits))
    task = reference.LogpTask(usable, shard, return_entropy, keep_mask, inplace_backward, logit_cap)
    choice = choose("logp", logits.device, impl, float64_refusal(logits))
    record(choice, len(logits))
    with timed("logp", logits.device):
        log_probs, entropy = _function(choice.implementation).apply(logits, targets, task)
    return (log_probs, entropy) if return_entropy else log_probs


def _check_inputs(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, inplace_backward: bool
) -> None:
    check_tensor("logits", logits, ["N", "V_local"])
    check_targets(targets, len(logits), logits.device)
    check_temperature(temperature, len(logits), logits.device)
    if inplace_backward and 0 in logits.stride() and logits.numel() > 1:
        raise invalid("logits", "own each element with inplace_backward", "an expanded tensor", "copy it")


def _function(implementation: str) -> type[Function]:
    if implementation == "triton":
        from rl_kernel.ops.logp import autograd

        return autograd.TritonLogp
    return reference.Logp
