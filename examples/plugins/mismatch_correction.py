"""Importance weights between engine and trainer, with the settings of a YAML file.

    --use-tis --custom-tis-function-path mismatch_correction.correct --custom-config-path mismatch_correction.yaml

The keys of the file are attributes of `args`. With `tis_level` token, each token has a weight; with sequence, each
response has a weight. Responses whose mean ratio is outside of `rs_lower_bound` and `rs_upper_bound` are dropped.
"""

import torch

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp


def correct(
    *,
    args,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
    **kwargs,
):
    """Returns the weighted losses, the masks without the dropped responses, and metrics per token."""
    weights, masks, dropped = [], [], []
    columns = (train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)
    for train, rollout, mask, *place in zip(*columns, strict=True):
        log_ratio = all_gather_with_cp(train, *place) - all_gather_with_cp(rollout, *place)
        mean = (log_ratio * mask).sum() / mask.sum().clamp(min=1)
        if args.tis_level == "sequence":
            log_ratio = mean.expand_as(log_ratio)
        weight = log_ratio.exp().clamp(args.tis_lower_bound, args.tis_upper_bound)
        keep = (args.rs_lower_bound <= mean.exp()) & (mean.exp() <= args.rs_upper_bound)
        masks.append(mask * keep)
        weights.append(slice_log_prob_with_cp(weight, *place))
        dropped.append(slice_log_prob_with_cp(1.0 - keep.float().expand_as(weight), *place))
    weights = torch.cat(weights)
    return pg_loss * weights, masks, {"tis_weight": weights, "rs_dropped": torch.cat(dropped)}
