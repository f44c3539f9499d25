"""The inputs and results of a micro-batch's loss. The micro-batch has R response tokens."""

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
    """The response tokens that hooks get: r of the R tokens, on this context-parallel rank. The defaults are for all R
    tokens.

    `lengths` holds each sample's r_i. `local` maps [R] to [r], `whole` maps [r] to [R] on every rank, and `total` maps
    a rank's part of the loss to the sum over all ranks. The functions are differentiable, and collective over
    context-parallel ranks.
    """

    lengths: list[int]
    local: Callable[[Tensor], Tensor] = _same
    whole: Callable[[Tensor], Tensor] = _same
    total: Callable[[Tensor], Tensor] = _same
    args: Namespace | None = None
    """Flat flags of the run, which each function of the user gets. None for those of the configuration."""

    def split(self, column: Tensor) -> list[Tensor]:
        """Splits [R] into one tensor [r_i] per sample."""
        return list(torch.split(self.local(column), self.lengths))


@dataclass
class TokenColumns:
    """The inputs of a loss, [R] each: `log_probs` and `entropy` of the present policy, fp32 nats, and `columns`, which
    holds each column of `slime.data.columns` that training micro-batches carry and this run has.

    `t["advantages"]` returns a column that the loss needs. `t.get("old_log_probs")` returns None for a missing column.
    `sample_of_row` is each token's sample, from 0. `normaliser` is the last factor of `denominators`: the number
    of rollouts in the step, or the number of tokens with --calculate-per-token-loss. `view` has the tokens that hooks
    get; None for all tokens.
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
    names, and -inf without an id. None if the loss reads no ids."""

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise ValueError(
                f"the loss must have the column {column}, got {', '.join(sorted(self.columns))}; something before the "
                "loss has to fill it"
            )
        return self.columns[column]

    def get(self, column: str) -> Tensor | None:
        """Returns a column, or None if this run does not have the column."""
        return self.columns.get(column)

    @property
    def mask(self) -> Tensor:
        """Returns 1 for each token that is trained on, else 0."""
        return self["loss_masks"]

    @property
    def denominators(self) -> Tensor:
        """Returns the number by which each token's loss is divided."""
        return self["loss_denominators"]

    @property
    def old_log_probs(self) -> Tensor:
        """Returns the log-probs before this rollout's first step. Without the column, the policy has not changed since
        then, and its detached log-probs are the same."""
        old = self.get("old_log_probs")
        return self.log_probs.detach() if old is None else old

    @cached_property
    def weights(self) -> Tensor:
        """Returns each token's weight in a mean over the step."""
        return self.mask / self.denominators

    def mean(self, per_token: Tensor) -> Tensor:
        """Returns `(mask / denominators * per_token).sum()`, this micro-batch's part of the mean over the step."""
        return weighted(per_token, self.weights).sum()

    def mask_untrained(self) -> TokenColumns:
        """Returns a copy with 0 in every real number of a token that is not trained on. A number of a tool's token,
        such as a log-prob of -9999, then has no effect on ratios, gradients and hooks."""
        trained = self.mask != 0

        def zero_untrained(x: Tensor) -> Tensor:
            return torch.where(trained if x.ndim == 1 else trained[:, None], x, 0.0)

        return replace(
            self,
            log_probs=zero_untrained(self.log_probs),
            entropy=None if self.entropy is None else zero_untrained(self.entropy),
            of_ids=None if self.of_ids is None else zero_untrained(self.of_ids),
            columns={
                name: zero_untrained(x) if x.is_floating_point() and name not in _WEIGHTS else x
                for name, x in self.columns.items()
            },
        )

    def per_sample(self, column: Tensor) -> list[Tensor]:
        """Splits [R] into one tensor [R_i] per sample. Only losses that get whole sequences may call it."""
        return list(torch.split(column, self.response_lengths))


Losses = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""The loss, the metrics to add, and the metrics whose maximum is reported."""
