"""`logp`: log-probabilities and entropy from materialised logits (custom losses, audits)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from rl_kernel.checks import check_temperature, check_tensor, compute_dtype
from rl_kernel.ops.logp.reference import Logp
from rl_kernel.vocab import check_targets, make_shard


def logp(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target and, if asked, the entropy of its distribution, in nats.

    `log_p = log_softmax(logits[:, :vocab_size].float() / temperature[:, None], -1)`;
    `log_p.gather(1, targets[:, None])[:, 0]` and `-(log_p.exp() * log_p).sum(-1)`; the softmax and all sums
    in float32 whatever the dtype of the logits.

    Args:
        logits: [N, V_local] float32, bfloat16, float16 or float64 (computed in float64: for derivative
            checks), any strides; N may be 0. Columns of -inf have probability 0.
        targets: [N] int64 or int32 token ids of the whole vocabulary.
        temperature: number or [N], > 0; a constant.
        tp_group: the columns are split over this group; `targets`, `temperature` and the upstream gradient
            must be equal on its ranks, and the ranks' shards must partition the vocabulary.
        vocab_start: id of the first column.
        vocab_size: ids from here on are padding: no probability, zero gradient. A shard may be all padding.
        return_entropy: also return the entropy; it costs a gradient only if it is used in a loss.

    Returns:
        log_probs [N] float32 (float64 for float64 logits), or (log_probs, entropy), equal on all ranks of
        `tp_group`; differentiable once in the logits, whose gradient has their dtype.

    Raises:
        ValueError: wrong shape, dtype or device, a target outside the vocabulary (values are read back to the
        host),
            temperature <= 0, empty shard, shards that do not partition the vocabulary.

    Memory: one tile and the gradient; under `tp_group` one all-gather of [3 or 4, N] forward, none backward.
    Deterministic: the same inputs give the same bits.
    """
    check_tensor("logits", logits, ["N", "V_local"])
    tokens, stored = logits.shape
    check_targets(targets, tokens, logits.device)
    check_temperature(temperature, tokens, logits.device)
    shard = make_shard("logits", stored, targets, vocab_start, vocab_size, tp_group)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(compute_dtype(logits))
    log_probs, entropy = Logp.apply(logits, targets, temperature, shard, return_entropy)
    return (log_probs, entropy) if return_entropy else log_probs
