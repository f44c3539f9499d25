"""Divides the policy loss by a fixed length, so that long responses have more weight (Dr. GRPO, 2503.20783).

--custom-pg-loss-reducer-function-path fixed_length.reducer
"""

from vime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

LENGTH = 1000.0


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Returns a function of pg_loss: `(pg_loss * mask).sum() / LENGTH` over this rank's tokens."""
    total = get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=True)
    return lambda pg_loss: total(pg_loss) / LENGTH
