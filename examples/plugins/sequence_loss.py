"""A custom loss that needs whole responses: clipped ratios of sequences, under context parallelism too.

    --loss-type custom_loss --custom-loss-function-path sequence_loss.loss

Each rank of the context-parallel group has a part of every response. The mean over a response needs all ranks'
parts (`all_gather_with_cp`). The returned loss is this rank's part (`slice_log_prob_with_cp`).
"""

import torch
from vime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
from vime.backends.megatron_utils.loss import get_log_probs_and_entropy


def loss(args, batch, logits, sum_of_sample_mean):
    """Computes `-min(s * A, clip(s, 1 - eps, 1 + eps) * A)`; `s` is the exponential of a response's mean log-ratio."""
    places = list(zip(batch["total_lengths"], batch["response_lengths"], strict=True))
    _, out = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    terms = []
    for place, new, old, mask, advantage in zip(
        places, out["log_probs"], batch["log_probs"], batch["loss_masks"], batch["advantages"], strict=True
    ):
        difference = all_gather_with_cp(new, *place) - all_gather_with_cp(old, *place)
        ratio = ((difference * mask).sum() / mask.sum().clamp(min=1)).exp()
        clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
        whole = all_gather_with_cp(advantage, *place)
        per_token = -torch.minimum(ratio * whole, clipped * whole)
        terms.append(slice_log_prob_with_cp(per_token, *place))
    total = sum_of_sample_mean(torch.cat(terms))
    entropy = sum_of_sample_mean(torch.cat(out["entropy"]))
    return total, {"entropy_loss": entropy}
