"""`group_advantage` in plain PyTorch: the definition of correct.

Sums are in float64, over the entries of a group in batch order, on every device. The code sums a padded matrix with one
row per group along its rows. Scattered additions would have no fixed order on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_kernel.checks import invalid


def group_advantage_reference(
    rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None, normalize_std: bool, eps: float
) -> Tensor:
    """Computes rewards [S] float, group_ids and rollout_ids [S] integer (after `check_siblings`) -> [S] float32."""
    rewards = rewards.double()
    group_names, group = torch.unique(group_ids, return_inverse=True)
    values, owner = rewards, group
    if rollout_ids is not None:
        values, owner = _merge_siblings(rewards, group, rollout_ids)
    table, counted = _rows_by(values, owner, len(group_names))
    count = counted.sum(1)
    mean = table.sum(1) / count
    advantage = rewards - mean[group]
    if normalize_std:
        spread = torch.where(counted, table - mean[:, None], 0.0).square().sum(1)
        std = (spread / (count - 1).clamp(min=1)).sqrt()
        scale = torch.where(count > 1, std + eps, 1.0)
        advantage = advantage / scale[group]
    return advantage.float()


def check_siblings(group_ids: Tensor, rollout_ids: Tensor) -> None:
    """Raises ValueError if two samples of the same rollout are in two groups. Copies the ids to the host."""
    pairs = torch.unique(torch.stack([rollout_ids.long(), group_ids.long()]), dim=1)
    again = (pairs[0, 1:] == pairs[0, :-1]).nonzero()
    if len(again):
        which = int(again[0])
        got = f"rollout {int(pairs[0, which])} in groups {pairs[1, which : which + 2].tolist()}"
        raise invalid(
            "rollout_ids", "lie in one group each", got, "number rollouts without repeats over the batch"
        )


def _merge_siblings(rewards: Tensor, group: Tensor, rollout_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one value per rollout (the mean reward of its samples), and the group of each rollout."""
    names, rollout = torch.unique(rollout_ids, return_inverse=True)
    table, counted = _rows_by(rewards, rollout, len(names))
    groups, _ = _rows_by(group, rollout, len(names))
    return table.sum(1) / counted.sum(1), groups[:, 0]


def _rows_by(values: Tensor, owner: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Returns a matrix [owners, most] with one row per owner, and its bool mask of values. A row holds the owner's
    values in batch order, then zeros."""
    order = torch.argsort(owner, stable=True)
    sizes = torch.bincount(owner, minlength=owners)
    first = torch.cumsum(sizes, 0) - sizes
    row = owner[order]
    column = torch.arange(len(owner), device=owner.device) - first[row]
    table = values.new_zeros(owners, int(sizes.max()))
    table[row, column] = values[order]
    return table, torch.arange(table.shape[1], device=owner.device) < sizes[:, None]
