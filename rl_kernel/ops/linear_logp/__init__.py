"""`linear_logp`: log-probabilities and entropy straight from hidden states, without `[N, V]` logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import check_temperature, check_tensor, compute_dtype, invalid
from rl_kernel.ops.linear_logp.reference import LinearLogp
from rl_kernel.vocab import check_targets, make_shard

ROUNDING = {"float32": None, "bfloat16": torch.bfloat16}


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
    return_entropy: bool = False,
    logits_dtype: str = "float32",
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target and, if asked, the entropy of its distribution, in nats.

    `log_p = log_softmax(F.linear(hidden, weight, bias)[:, :vocab_size] / temperature[:, None], -1)`;
    `log_p.gather(1, targets[:, None])[:, 0]` and `-(log_p.exp() * log_p).sum(-1)`, all in float32.

    Args:
        hidden: [N, H] float32, bfloat16 or float16; any strides; N may be 0. float64 (here or in `weight`)
            makes the computation and the results float64: for derivative checks.
        weight: [V_local, H], the output layer's rows of this process; tied or not.
        targets: [N] int64 or int32 token ids of the whole vocabulary.
        temperature: number or [N], > 0; a constant.
        tp_group: the vocabulary is split over this group. `hidden`, `targets`, `temperature` and the upstream
            gradient must be equal on its ranks; the ranks' shards must partition the vocabulary.
        vocab_start: id of the first row of `weight`.
        vocab_size: ids from here on are padding: no probability, no gradient. A shard may be all padding.
        bias: [V_local].
        return_entropy: also return the entropy; it costs a gradient only if it is used in a loss.
        logits_dtype: "float32", or "bfloat16" to round the logits (before the temperature) as an engine does
            that samples from bfloat16 logits. Gradients pass straight through the rounding.

    Returns:
        log_probs [N] float32, or (log_probs, entropy), equal on all ranks of `tp_group`; differentiable once
        in hidden, weight and bias. Gradients have their input's dtype and are summed in float32. That of
        `hidden` is the whole one, summed over `tp_group`: callers must not reduce it again.

    Raises:
        ValueError: wrong shape, dtype or device, a target outside the vocabulary (values are read back to the
            host), temperature <= 0, empty shard, shards that do not partition the vocabulary.

    Memory: one tile of logits, and a float32 copy of a narrower weight; under `tp_group` one all-gather of
    [3 or 4, N] forward, one all-reduce of [N, H] backward. Deterministic: the same inputs give the same bits.
    """
    _check_inputs(hidden, weight, targets, temperature, bias, logits_dtype)
    shard = make_shard("weight", len(weight), targets, vocab_start, vocab_size, tp_group)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(compute_dtype(hidden, weight, bias))
    rounding = ROUNDING[logits_dtype]
    out = LinearLogp.apply(hidden, weight, bias, targets, temperature, shard, rounding, return_entropy)
    return out if return_entropy else out[0]


def _check_inputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    bias: Tensor | None,
    logits_dtype: str,
) -> None:
    check_tensor("hidden", hidden, ["N", "H"])
    tokens, width = hidden.shape
    check_tensor("weight", weight, ["V_local", width], device=hidden.device)
    if bias is not None:
        check_tensor("bias", bias, [len(weight)], device=hidden.device)
    check_targets(targets, tokens, hidden.device)
    check_temperature(temperature, tokens, hidden.device)
    if logits_dtype not in ROUNDING:
        todo = "take the dtype that the rollout engine samples from"
        raise invalid("logits_dtype", "be 'float32' or 'bfloat16'", repr(logits_dtype), todo)
