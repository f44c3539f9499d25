"""`linear_logp`: log-probabilities and entropy straight from hidden states, without `[N, V]` logits.

This holds for it and for `linear_token_loss`, which takes the same layer. No host synchronisation, except on the first
call with a new `tp_group` layout. Where values are not read (on a device, unless the mode is strict) the log-prob of a
target outside the vocabulary, or under a temperature that is none, is NaN. Under `tp_group` one all-gather of
[3 to 7, N] forward (and in the bfloat16 form one all-reduce of [N]), one all-reduce of [N, H] backward. Deterministic:
the same inputs give the same bits on one kind of device. float64 in `hidden` or `weight` makes the computation and the
results float64: for derivative checks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import compute_dtype
from rl_kernel.dispatch import choose
from rl_kernel.kept import KeptTokens
from rl_kernel.ops.linear_logp.arguments import check_layer, check_workspace, layer_refusal, logits_rounding
from rl_kernel.ops.linear_logp.plan import WORKSPACE_BYTES
from rl_kernel.ops.linear_logp.reference import LinearLogp
from rl_kernel.telemetry import record, timed
from rl_kernel.vocab import usable_temperature


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
    return_entropy: bool = False,
    logits_dtype: str | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target and, if asked, the entropy of the distribution, in nats.

    `log_p = log_softmax(F.linear(hidden, weight, bias)[:, :vocab_size] / temperature[:, None], -1)`;
    `log_p.gather(1, targets[:, None])[:, 0]` and `-(log_p.exp() * log_p).sum(-1)`, all in float32.
    Collectives, synchronisation, determinism, and what bad values give that are not read: see the module.

    Args:
        hidden: [N, H] float32, bfloat16, float16 or float64; any strides; N may be 0.
        weight: [V_local, H], the output layer's rows of this process; tied or not.
        targets: [N] int64 or int32 token ids of the whole vocabulary.
        temperature: number or [N], > 0; a constant.
        tp_group: the vocabulary is split over this group. `hidden`, `targets`, `temperature` and the upstream
            gradient must be equal on its ranks; the ranks' shards must partition the vocabulary.
        vocab_start: id of the first row of `weight`.
        vocab_size: ids from here on are padding: no probability, no gradient. A shard may be all padding.
        bias: [V_local].
        keep_mask: the ids each token kept in a rollout's top-p or top-k: the log-prob is that of the softmax over them,
            the entropy that over all. Up to 64 bytes an id beside the workspace.
        return_entropy: also return the entropy; it costs a gradient only if it is used in a loss.
        logits_dtype: "bfloat16" rounds the logits before the temperature, "float32" does not. None rounds to the
            dtype of `weight`, as vLLM does before it samples. Gradients pass straight through the rounding.
        workspace_bytes: bound of what is held beyond inputs, results and gradients; logits beyond it are made twice.
        impl: "triton" or "reference", whatever the mode; None lets the mode choose.

    Returns:
        log_probs [N] float32, or (log_probs, entropy), equal on all ranks of `tp_group`; differentiable once in hidden,
        weight and bias. Gradients have their input's dtype and are summed in float32. That of `hidden` is the whole
        one, summed over `tp_group`: callers must not reduce it again.

    Raises:
        ValueError: wrong shape, dtype or device, temperature <= 0, empty shard, shards that do not partition the
            vocabulary, too little workspace; on the host and in strict mode also a target outside the vocabulary.
        Refused: strict mode, where the kernels cannot take the inputs.
    """
    shard = check_layer(
        hidden, weight, targets, temperature, tp_group, vocab_start, vocab_size, bias, keep_mask
    )
    check_workspace(workspace_bytes)
    settings = targets, temperature, keep_mask, shard, logits_rounding(logits_dtype, weight)
    choice = choose("linear_logp", hidden.device, impl, layer_refusal(hidden, weight, bias))
    record(choice, len(hidden))
    with timed("linear_logp", hidden.device):
        out = _run(choice.implementation, (hidden, weight, bias), settings, workspace_bytes, return_entropy)
    return out if return_entropy else out[0]


def _run(
    implementation: str,
    layer: tuple[Tensor, Tensor, Tensor | None],
    settings: tuple[Any, ...],
    workspace_bytes: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """`settings`: targets, temperature, keep_mask, shard, rounding."""
    if implementation == "triton":
        from rl_kernel.ops.linear_logp.autograd import LinearLogpOnDevice, seen_by_autograd

        return LinearLogpOnDevice.apply(*seen_by_autograd(*layer), settings, workspace_bytes, with_entropy)
    targets, temperature, keep_mask, shard, rounding = settings
    temperature = usable_temperature(temperature, compute_dtype(*layer))
    return LinearLogp.apply(*layer, targets, temperature, shard, rounding, keep_mask, with_entropy)
