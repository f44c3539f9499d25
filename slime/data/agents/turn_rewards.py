"""Turns rewards of single turns into one advantage per token.

A turn is a run of trained tokens. Tokens of tools or users separate two turns. `metadata["turn_rewards"]` of a sample
has one reward per turn (`slime.sessions.Session.reward`).
"""

from __future__ import annotations

import itertools
import math

import torch

import rl_kernel
from slime.types import Sample

KEY = "turn_rewards"
"""Key of the rewards in `Sample.metadata`."""


def turn_advantages(
    samples: list[Sample], *, centred: bool = True, normalize_std: bool = True
) -> list[list[float]]:
    """Returns for each response token the advantage of its turn among the same turns of the group. The advantage is 0
    for a token that is not trained on, and for a sample without rewards of turns.

    Maths: `G_k = r[k:].sum()`, `A_k = (G_k - G_k[group].mean()) / (G_k[group].std() + 1e-6)`, over the samples of the
    group that have a turn k. Without `normalize_std`, there is no division. Without `centred`, `A_k = G_k`. Raises
    ValueError if the number of rewards is not the number of turns, or if a reward is not finite.
    """
    returns: list[list[float]] = []
    for sample in samples:
        stored, turns = sample.metadata.get(KEY), _turns(sample)
        rewards = [0.0] * turns if stored is None else [float(reward) for reward in stored]
        if len(rewards) != turns or not all(map(math.isfinite, rewards)):
            raise ValueError(
                f"metadata {KEY} must have one finite number per turn, got {stored} for {turns} turns of sample "
                f"{sample.index} of group {sample.group_index}; give 0 to a turn without one"
            )
        returns.append(list(itertools.accumulate(reversed(rewards)))[::-1])
    if not centred:
        return [_spread(sample, g) for sample, g in zip(samples, returns, strict=True)]
    positions = [
        (sample.group_index, k) for sample, g in zip(samples, returns, strict=True) for k in range(len(g))
    ]
    if not positions:
        return [[0.0] * sample.response_length for sample in samples]
    number = {position: i for i, position in enumerate(dict.fromkeys(positions))}
    flat = iter(
        rl_kernel.group_advantage(
            torch.tensor([g for of_sample in returns for g in of_sample]),
            torch.tensor([number[position] for position in positions]),
            rollout_ids=torch.arange(len(positions)),
            normalize_std=normalize_std,
        ).tolist()
    )
    return [_spread(sample, [next(flat) for _ in g]) for sample, g in zip(samples, returns, strict=True)]


def _mask(sample: Sample) -> list[int]:
    return sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length


def _turns(sample: Sample) -> int:
    return sum(bool(trained) for trained, _ in itertools.groupby(_mask(sample)))


def _spread(sample: Sample, advantages: list[float]) -> list[float]:
    """Returns for each token the advantage of its turn."""
    found: list[float] = []
    turns = iter(advantages)
    for trained, run in itertools.groupby(_mask(sample)):
        found += [next(turns) if trained else 0.0] * len(list(run))
    return found
