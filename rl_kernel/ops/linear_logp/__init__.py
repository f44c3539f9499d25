"""`linear_logp`: log-probabilities and entropy directly from hidden states, without `[N, V]` logits.

These facts are valid for `linear_logp` and for `linear_token_loss`, which takes the same layer:

- The operators do not wait for the device, except in the first call with a new `tp_group` layout.
- On a device, values are read in strict mode only. In the other modes, a target outside the vocabulary or a temperature
  that is not positive makes the log-prob NaN.
- Under `tp_group`, the forward runs one all-gather of [3 to 7, N] (the bfloat16 form also one all-reduce of [N]), and
  the backward one all-reduce of [N, H].
- The same inputs give the same bits on one kind of device.
- A gradient has its input's dtype and is summed in float32. The gradient of `hidden` is already summed over `tp_group`:
  callers must not reduce it again.
- The log-probs of `ids` are over the whole vocabulary. Ids of a token differ. The id -1 marks a missing id, whose
  log-prob is -inf without a gradient.
- float64 in `hidden` or `weight` makes the computation and the results float64. It is meant for derivative checks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import invalid
from rl_kernel.dispatch import choose
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.arguments import Task, checked_task, layer_refusal
from rl_kernel.ops.linear_logp.plan import WORKSPACE_BYTES
from rl_kernel.ops.linear_logp.reference import LinearLogp, linear_top_reference
from rl_kernel.telemetry import record, timed
from rl_kernel.token_ids import Top


def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
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
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Returns each target's log-probability and, if requested, the entropy and the log-probs of ids, in nats.

    `log_p = log_softmax(F.linear(hidden, weight, bias)[:, :vocab_size] / temperature[:, None], -1)`, with a soft cap
    `logit_scale * logit_cap * tanh(logits / logit_cap)` for the logits; `log_p.gather(1, targets[:, None])[:, 0]` and
    `-(log_p.exp() * log_p).sum(-1)`, in float32. See the module's docstring for collectives, determinism, bad values.

    Args:
        hidden: [N, H] float32, bfloat16, float16 or float64; any strides; N may be 0.
        weight: [V_local, H], the output layer's rows of this process; tied to the embedding or not.
        targets: [N] int64 or int32 token ids of the whole vocabulary.
        temperature: number or [N], > 0; a constant.
        tp_group: its ranks' shards partition the vocabulary. All other arguments and upstream gradients are equal.
        vocab_start: id of the first row of `weight`, and of `bias` [V_local].
        vocab_size: ids from this number on are padding, without probability or gradient; also for a whole shard.
        keep_mask: the ids that sampling kept. The log-prob's softmax is over these ids, the entropy's over all ids.
            Costs up to 64 bytes per id on top of the workspace.
        ids: [N, K] int32 or int64, other ids whose log-probs are returned (-1: missing); not with `keep_mask`.
        return_entropy: also return the entropy. The entropy costs a gradient only if a loss uses it.
        logits_dtype: "bfloat16" rounds the logits before the temperature, "float32" does not. None rounds to the
            dtype of `weight`, as vLLM does before it samples. Gradients pass through the rounding unchanged.
        logit_cap, logit_scale: the cap rounds each step to that dtype, the scale is not rounded; both > 0.
        workspace_bytes: limit of memory beyond inputs, results and gradients. Logits beyond it are computed twice.
        impl: "triton" or "reference" overrides the mode; None lets the mode choose.

    Returns:
        log_probs [N] float32, then entropy [N] and the ids' log-probs [N, K], if requested; equal on all ranks of
        `tp_group`. All are differentiable once in hidden, weight and bias.

    Raises:
        ValueError: a wrong shape, dtype, device, temperature, cap, shard or workspace; on the host and in strict mode
            also a target or id outside the vocabulary. Refused: strict mode, and the kernels cannot take the inputs.
    """
    task = checked_task(
        hidden, weight, bias, targets, temperature=temperature, tp_group=tp_group, vocab_start=vocab_start,
        vocab_size=vocab_size, keep_mask=keep_mask, with_entropy=return_entropy, logits_dtype=logits_dtype,
        workspace_bytes=workspace_bytes, logit_cap=logit_cap, logit_scale=logit_scale, ids=ids)  # fmt: skip
    choice = choose("linear_logp", hidden.device, impl, layer_refusal(hidden, weight, bias))
    record(choice, len(hidden))
    with timed("linear_logp", hidden.device):
        found = [x for x in _run(choice.implementation, hidden, weight, bias, task) if x is not None]
    return tuple(found) if len(found) > 1 else found[0]


@torch.no_grad()
def linear_top(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    count: int,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    logits_dtype: str | None = None,
    logit_cap: float | None = None,
    logit_scale: float = 1.0,
    workspace_bytes: int = WORKSPACE_BYTES,
    impl: str | None = None,
) -> tuple[Tensor, Top]:
    """Returns the log-probs of `linear_logp` [N], and each token's `count` largest log-probs with their ids.

    `top = log_p.topk(count, 1)`, without a gradient. Equal log-probs are ordered by the lowest id, so that a split of
    the vocabulary changes nothing. The arguments are those of `linear_logp`. See `Top` for the result. Under
    `tp_group`, the call runs a second all-gather of [N, count] int64.

    Raises:
        As `linear_logp`; ValueError: `count` below 1.
    """
    task = checked_task(
        hidden, weight, bias, targets, temperature=temperature, tp_group=tp_group, vocab_start=vocab_start,
        vocab_size=vocab_size, keep_mask=None, with_entropy=False, logits_dtype=logits_dtype,
        workspace_bytes=workspace_bytes, logit_cap=logit_cap, logit_scale=logit_scale)  # fmt: skip
    if count < 1:
        raise invalid("count", "be >= 1", count, "use linear_logp for the targets alone")
    task = replace(task, top=count)
    choice = choose("linear_top", hidden.device, impl, layer_refusal(hidden, weight, bias))
    record(choice, len(hidden))
    with timed("linear_top", hidden.device):
        if choice.implementation == "triton":
            from rl_kernel.ops.linear_logp.autograd import linear_top_on_device

            return linear_top_on_device(hidden, weight, bias, task)
        return linear_top_reference(hidden, weight, bias, task)


def _run(
    implementation: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    out: tuple[Tensor, Tensor | None, Tensor | None]
    if implementation == "triton":
        from rl_kernel.ops.linear_logp.autograd import LinearLogpOnDevice, seen_by_autograd

        out = LinearLogpOnDevice.apply(*seen_by_autograd(hidden, weight, bias), task)
    else:
        out = LinearLogp.apply(hidden, weight, bias, task)
    return out
