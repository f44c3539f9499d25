"""Named shapes of `group_advantage`, their inputs and the float64 formula. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupAdvantageCase:
    """A shape: S samples of `groups` groups in random order, with about two samples per rollout."""

    name: str
    samples: int
    groups: int

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rewards [S] of `dtype`, group_ids and rollout_ids [S] int64."""
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.randn(self.samples, generator=generator)
        rollouts = torch.randint(0, max(self.samples // 2, 1), (self.samples,), generator=generator)
        return rewards.to(device, dtype), (rollouts % self.groups).to(device), rollouts.to(device)


CASES = (
    GroupAdvantageCase("no_samples", 0, 1),
    GroupAdvantageCase("one_sample", 1, 1),
    GroupAdvantageCase("one_group", 9, 1),
    GroupAdvantageCase("ragged", 43, 5),
)
"""Cases that are small enough for Triton's interpreter."""

LARGE = (GroupAdvantageCase("many", 2000, 250), GroupAdvantageCase("several_blocks", 4099, 37))
"""Cases with more samples. The kernels' blocks hold 1024 samples."""


def formula(
    rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None, *, normalize_std: bool = True
) -> Tensor:
    """Computes the definition group by group in float64, on the host."""
    rewards, group_ids = rewards.double().cpu(), group_ids.cpu()
    rollouts = torch.arange(len(rewards)) if rollout_ids is None else rollout_ids.cpu()
    out = torch.empty_like(rewards)
    for group in group_ids.unique():
        here = group_ids == group
        values = torch.stack([rewards[rollouts == rollout].mean() for rollout in rollouts[here].unique()])
        out[here] = rewards[here] - values.mean()
        if normalize_std and len(values) > 1:
            out[here] /= values.std() + 1e-6
    return out
