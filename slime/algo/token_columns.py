"""What the loss of a micro-batch reads and returns. R response tokens of the micro-batch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from slime.algo.importance import weighted

_WEIGHTS = ("loss_masks", "loss_denominators")


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class HookView:
    """The response tokens that hooks see: this context-parallel rank's r of R. Without arguments: all.

    `lengths`: r_i of each sample. `local`: [R] -> [r]; `whole`: [r] -> [R] on every rank; `total`: a rank's part of the
    loss -> the sum of all parts. Differentiable, collective over context-parallel ranks.
    """

    lengths: list[int]
    local: Callable[[Tensor], Tensor] = _same
    whole: Callable[[Tensor], Tensor] = _same
    total: Callable[[Tensor], Tensor] = _same
    args: Namespace | None = None
    """Flat flags of the run, which each function of the user gets. None for those of the configuration."""

    def split(self, column: Tensor) -> list[Tensor]:
        """[R] -> one tensor [r_i] per sample."""
        return list(torch.split(self.local(column), self.lengths))


@dataclass
class TokenColumns:
    """What a loss may read, [R] each: `log_probs` and `entropy` of the present policy, fp32 nats, and `columns`, which
    holds each column of `slime.data.columns` that training micro-batches carry and this run has.

    `t["advantages"]` is a column that the loss needs, `t.get("old_log_probs")` one that may be missing.
    `sample_of_row`: the sample of each token, from 0. `normaliser` is the last factor of `denominators`: the step's
    rollouts, or tokens with --calculate-per-token-loss. `view`: what hooks get of the columns; None for all.
    """

    log_probs: Tensor
    entropy: Tensor | None
    columns: Mapping[str, Tensor]
    sample_of_row: Tensor
    total_lengths: list[int]
    response_lengths: list[int]
    normaliser: float
    view: HookView | None = None
    of_ids: Tensor | None = None
    """[R, K] fp32 nats: log-probs of the present policy at the ids of the column that `slime.algo.needs.ids_read`
    names; -inf without an id. None where no loss reads them."""

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise ValueError(
                f"the loss must have the column {column}, got {', '.join(sorted(self.columns))}; something before the "
                "loss has to fill it"
            )
        return self.columns[column]

    def get(self, column: str) -> Tensor | None:
        """A column; None where this run does not have it."""
        return self.columns.get(column)

    @property
    def mask(self) -> Tensor:
        """1 for the tokens that are trained on, else 0."""
        return self["loss_masks"]

    @property
    def denominators(self) -> Tensor:
        """What the loss of each token is divided by."""
        return self["loss_denominators"]

    @property
    def old_log_probs(self) -> Tensor:
        """The log-probs before this rollout's first step. Without the column the policy has not changed since then, so
        its own log-probs, detached, are the same."""
        old = self.get("old_log_probs")
        return self.log_probs.detach() if old is None else old

    @cached_property
    def weights(self) -> Tensor:
        """The weight of each token in a mean over the step."""
        return self.mask / self.denominators

    def mean(self, per_token: Tensor) -> Tensor:
        """`(mask / denominators * per_token).sum()`: this micro-batch's part of the mean over the step."""
        return weighted(per_token, self.weights).sum()

    def of_trained(self) -> TokenColumns:
        """The same with 0 in each real number of a token that is not trained on. What a tool's token has there, such as
        a log-prob of -9999, then reaches no ratio, no gradient and no hook."""
        trained = self.mask != 0

        def kept(x: Tensor) -> Tensor:
            return torch.where(trained if x.ndim == 1 else trained[:, None], x, 0.0)

        return replace(
            self,
            log_probs=kept(self.log_probs),
            entropy=None if self.entropy is None else kept(self.entropy),
            of_ids=None if self.of_ids is None else kept(self.of_ids),
            columns={
                name: kept(x) if x.is_floating_point() and name not in _WEIGHTS else x
                for name, x in self.columns.items()
            },
        )

    def per_sample(self, column: Tensor) -> list[Tensor]:
        """[R] -> one tensor [R_i] per sample. Only for losses that get whole sequences."""
        return list(torch.split(column, self.response_lengths))


Losses = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""The loss, the metrics to sum, and the metrics of which the maximum counts."""
