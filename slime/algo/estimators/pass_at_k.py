"""pass@k rewards (PKPO, 2505.15201): the advantage of an answer is the amount by which it raises the best of k answers.

If k is the size of the group, the best answer gets its reward minus the second best reward, and the others get 0
(2503.19595; verl's grpo_passk).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.algo.estimators.record import Estimator, Response, same_for_all_tokens
from slime.algo.surrogates import CLIPPED
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.schema import Config


def contribution(reward: float, others: Sequence[float], k: int) -> float:
    """Returns the mean of `max(reward - max(S), 0)` over all subsets S of `others` with k - 1 answers.

    This is the paper's estimator s with the leave-one-out baseline of k - 1 answers. It takes rewards of any kind. For
    rewards 0 and 1 the mean is C(wrong others, k - 1) / C(others, k - 1) for a right answer, and 0 for a wrong one. `2
    <= k`, and `k - 1 <= len(others)`.
    """
    assert 2 <= k <= len(others) + 1
    subsets = math.comb(len(others), k - 1)
    # the j-th smallest reward is the maximum of the subsets with k - 2 of the j smaller rewards
    return sum(
        math.comb(j, k - 2) / subsets * (reward - other)
        for j, other in enumerate(sorted(others))
        if other < reward
    )


def _raises_the_best(c: Config, response: Response) -> tuple[Tensor, Tensor]:
    group = response.columns["group_rewards"].tolist()  # the first reward is that of the sample itself
    k = c.algorithm.pass_at_k or len(group)
    if not 2 <= k <= len(group):
        raise FlagError(
            "--pass-at-k",
            "be from 2 to the rollouts of a group",
            f"{k} for a group of {len(group)}",
            "raise --n-samples-per-prompt, or keep whole groups in your hooks",
        )
    found = contribution(group[0], group[1:], k)
    return same_for_all_tokens(c, replace(response, reward=found))


def _group_holds_k(c: Config) -> None:
    n, k = c.data.n_samples_per_prompt, c.algorithm.pass_at_k
    if k is not None and k < 2:
        raise FlagError("--pass-at-k", "be 2 or more", k, "for single answers use another estimator")
    if max(k or 2, 2) > n:
        raise FlagError(
            "--n-samples-per-prompt",
            "be at least --pass-at-k with --advantage-estimator pass_at_k",
            f"{n} and {k or 'no --pass-at-k, which needs 2'}",
            "an answer is compared with subsets of its group",
        )


PASS_AT_K = Estimator(
    "pass_at_k",
    "mean over the subsets of k - 1 other answers: how much the answer raises their best reward",
    CLIPPED,
    _raises_the_best,
    reads=frozenset({"group_rewards"}),
    flags=frozenset({"pass_at_k"}),
    source="2505.15201",
    aliases=("grpo_passk",),
    checks=(_group_holds_k,),
)
