"""The policy losses of single tokens, for the benchmark of operators:

    vime bench op linear_token_loss --losses operator_bench.timed_losses:LOSSES

Each loss is the function that the trainer calls inside the operator (`slime.algo.policy_loss.compute_pg_loss`), with
default flags.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slime.algo.policy_loss import compute_pg_loss
from slime.algo.surrogates import SURROGATES
from slime.algo.token_columns import TokenColumns
from slime.config.schema import Config

BlockLoss = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""`loss(log_probs, rows)` returns loss and metrics of a block of tokens."""


def make_loss(name: str, old: Tensor, advantages: Tensor, mask: Tensor, denominator: float) -> BlockLoss:
    """Returns the loss of --pg-loss-type `name` over tokens with these columns, [N] each. One token in 100 is a chosen
    token."""
    c = Config.from_flat({"pg_loss_type": name, "eps_clip_high": 0.28})
    columns = {
        "old_log_probs": old,
        "advantages": advantages,
        "loss_masks": mask.int(),
        "loss_denominators": torch.full_like(old, denominator),
        "chosen_tokens": (torch.arange(len(old), device=old.device) % 100 == 0).float(),
        "sample_of_row": torch.zeros_like(mask, dtype=torch.long),
    }

    def loss(log_probs: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        of_rows = {column: values[rows] for column, values in columns.items()}
        t = TokenColumns(log_probs, None, of_rows, of_rows.pop("sample_of_row"), [], [], 1.0)
        return compute_pg_loss(c, t, t["old_log_probs"], None)

    return loss


LOSSES = {name: partial(make_loss, name) for name, record in SURROGATES.items() if not record.reads_sequences}
"""Maps a value of --pg-loss-type to the function that makes the loss."""
