"""The LM head: it maps the last stage's output to log-probs, entropy and loss. Only this package multiplies hidden
states by the output layer's weight.

Only response positions reach the head: hidden [P, H] -> hidden[rows] [r, H] -> rl_kernel, or logits [r, V_local] for an
operator, a provider or a hook that reads logits. Only the native kind computes logits [P, V_local] for all positions.

Shapes: P packed tokens, H hidden, V_local vocabulary rows of this tensor-parallel rank, R response tokens of the
micro-batch, r response tokens of this context-parallel rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor, nn

import rl_kernel
import rl_kernel.invariant as invariant
from rl_kernel.token_ids import Top
from slime import operators
from slime.algo.token_columns import Losses
from slime.config.sections.kernels import KernelsConfig
from slime.data import kept_tokens
from slime.data.packing import MicroBatch
from slime.megatron_backend.model.gpt import (
    capped,
    compute_logits,
    compute_values,
    gather_hidden,
    head_main_grad,
    logit_cap,
    output_weight,
    vocab_range,
)
from slime.megatron_backend.model.rows import GatheredRows, take
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step import native
from slime.megatron_backend.step.native import EntropyUse
from slime.tracking.timers import Timers

Objective = Callable[[Tensor, Tensor | None, slice, Tensor | None], Losses]
"""Maps (log_probs, entropy or None, rows, log-probs of the ids or None) to the losses for these rows of the response
tokens."""

Values = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probs [r] or [R], their entropies, and the log-probs of ids [r or R, K]; None for values that were not
requested."""


@dataclass
class MicroBatchLoss:
    """Loss and metrics of a micro-batch, as this rank computed them.

    The loss and `sums` of a step are sums over micro-batches and over the ranks of `LmHead.loss_group`. For `maxima`,
    the step keeps the largest values. `log_probs` are the trainer's, detached, for the rows that `LmHead.loss_rows`
    returns; None if a hook computed the loss.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    log_probs: Tensor | None = None


class Vocabulary(TypedDict):
    """The arguments about the model's head that rl_kernel's log-prob operators share."""

    tp_group: dist.ProcessGroup | None
    vocab_start: int
    vocab_size: int
    logit_cap: float | None


class LmHead(ABC):
    """Base class of the heads: log-probs, entropy and loss of a model on this rank. Every rank may build a head; the
    last stage calls it.

    Log-probs and entropies are `log_softmax(hidden @ weight.T / temperature)[target]` and the softmax's entropy,
    in nats, fp32, equal on all tensor-parallel ranks. If the model has a soft cap, it caps the logits first.
    """

    kind: ClassVar[operators.Head]

    def __init__(
        self, model: nn.Module, ranks: ParallelInfo, kernels: KernelsConfig, *, temperature: float
    ) -> None:
        self.model, self.ranks, self.kernels = model, ranks, kernels
        self.temperature, self.workspace_bytes = temperature, kernels.rl_kernel_workspace_mib * 2**20

    @abstractmethod
    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        """Returns the log-probs [r] of this context-parallel rank's response tokens, their entropies [r] unless
        `entropy` is "none", and the log-probs [r, K] of its `ids` [r, K]. Differentiable."""

    def log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        """Returns `local_log_probs` for all response tokens [R], with all `ids` [R, K], in the order of the samples, on
        every context-parallel rank.

        Collective over context-parallel ranks. Differentiable; see `whole`.
        """
        local = None if ids is None else batch.local(ids)
        log_probs, *others = self.local_log_probs(batch, output, entropy, local)
        values, of_ids = (None if x is None else whole(x, batch, self.ranks) for x in others)
        return whole(log_probs, batch, self.ranks), values, of_ids

    def loss(
        self,
        batch: MicroBatch,
        output: Tensor,
        objective: Objective,
        entropy: EntropyUse,
        timers: Timers,
        ids: Tensor | None = None,
    ) -> MicroBatchLoss:
        """Returns `objective` of the micro-batch, from its log-probs and the log-probs of `ids` [R, K]. The columns
        that the objective reads must have the rows of `loss_rows`."""
        with timers.measure("forward"):
            log_probs, values, of_ids = self.log_probs(batch, output, entropy, ids)
        with timers.measure("policy_loss"):
            loss, sums, maxima = objective(log_probs, values, slice(None), of_ids)
        # Detached: a metric that carries a graph would keep the logits of its micro-batch until the step has ended.
        sums = {name: value.detach() for name, value in sums.items()}
        return MicroBatchLoss(loss, sums, maxima, log_probs.detach())

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Returns the ranks whose losses add up to the step's loss. Every context-parallel rank computes the loss over
        all tokens, so that only data-parallel ranks add up."""
        return self.ranks.dp_group

    def loss_rows(self, batch: MicroBatch, column: Tensor) -> Tensor:
        """Returns the rows of a column [R] that the loss of this rank reads: all rows."""
        return column

    def all_rows(self, batch: MicroBatch, log_probs: Tensor) -> Tensor:
        """Returns [R] on every context-parallel rank from the log-probs of a MicroBatchLoss. Collective over these
        ranks."""
        return log_probs

    def logits(self, batch: MicroBatch, output: Tensor) -> Tensor:
        """Returns logits [r, V_local] fp32 of this rank's response positions, divided by the temperature, for a loss
        that reads logits.

        Columns that pad the vocabulary hold -1e30 or less and so have probability 0. Differentiable.
        """
        return self._compute_logits(self._hidden(batch, output))

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        logits = capped(self._raw_logits(hidden), logit_cap(self.model)).float()
        return native.mask_padding(logits, *vocab_range(self.model)) / self.temperature

    def top(self, batch: MicroBatch, output: Tensor, count: int) -> tuple[Tensor, Top]:
        """Returns the log-probs [r] of this context-parallel rank's response tokens, and each token's `count` largest
        log-probs. Without gradient. This implementation reads logits."""
        logits = self.logits(batch, output)
        vocab = vocab_range(self.model)
        return self.local_log_probs(batch, output, "none")[0], native.compute_top(logits, *vocab, count)

    def _hidden(self, batch: MicroBatch, output: Tensor) -> Tensor:
        """Returns the hidden states that predict the response tokens: [r, H], model dtype, equal on all tensor-parallel
        ranks."""
        hidden = gather_hidden(self.model, output)
        return take(hidden, GatheredRows.of(batch.rows, len(hidden)))

    def _raw_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [r, V_local] of hidden states [r, H] in the model's dtype, with the columns that pad the
        vocabulary. No prompt token and no padding token reaches the head."""
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        return torch.nn.functional.linear(hidden, output_weight(self.model))

    def _score_ids(self, batch: MicroBatch, output: Tensor, ids: Tensor | None) -> Tensor | None:
        """Returns the log-probs [r, K] of `ids` for a head with logits, which are computed a second time for this
        purpose."""
        if ids is None:
            return None
        return native.ids_log_probs(self.logits(batch, output), ids, *vocab_range(self.model))

    def vocabulary(self) -> Vocabulary:
        """Returns the part of the vocabulary that this rank has."""
        vocab_start, vocab_size = vocab_range(self.model)
        group = self.ranks.tp_group if self.ranks.tp_size > 1 else None
        cap = logit_cap(self.model)
        return {"tp_group": group, "vocab_start": vocab_start, "vocab_size": vocab_size, "logit_cap": cap}


class LinearHead(LmHead):
    """Head that calls rl_kernel.linear_logp. The logits for all rows never exist at the same time."""

    kind = operators.LINEAR

    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        return _values(
            rl_kernel.linear_logp(
                self._hidden(batch, output),
                output_weight(self.model),
                batch.targets,
                workspace_bytes=self.workspace_bytes,
                temperature=self.temperature,
                return_entropy=entropy != "none",
                keep_mask=kept_tokens.select_rows(batch.of_rows, batch.rows),
                ids=ids,
                **self.vocabulary(),
            ),
            entropy,
        )

    def top(self, batch: MicroBatch, output: Tensor, count: int) -> tuple[Tensor, Top]:
        return rl_kernel.linear_top(
            self._hidden(batch, output),
            output_weight(self.model),
            batch.targets,
            count,
            workspace_bytes=self.workspace_bytes,
            temperature=self.temperature,
            **self.vocabulary(),
        )


class OnePassHead(LinearHead):
    """Head that calls rl_kernel.linear_token_loss: the objective runs inside the operator, block by block of tokens.

    The logits of a block become their gradient at once, and the head's weight gradient is added directly to Megatron's
    fp32 `main_grad`. Each context-parallel rank computes the loss of its own tokens.
    """

    kind = operators.ONE_PASS

    def loss(
        self,
        batch: MicroBatch,
        output: Tensor,
        objective: Objective,
        entropy: EntropyUse,
        timers: Timers,
        ids: Tensor | None = None,
    ) -> MicroBatchLoss:
        with timers.measure("forward"):
            hidden = self._hidden(batch, output)
            exact = self._exact_log_probs(hidden, batch.targets)
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}

        def token_loss(
            log_probs: Tensor, values: Tensor | None, rows: slice, of_ids: Tensor | None = None
        ) -> tuple[Tensor, dict[str, Tensor]]:
            if exact is not None:
                log_probs = invariant.with_value(log_probs, exact[rows])
            loss, added, largest = objective(log_probs, values, rows, of_ids)
            for name, value in added.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
            for name, value in largest.items():
                maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
            return loss, {}

        with timers.measure("policy_loss"):
            result = rl_kernel.linear_token_loss(
                hidden,
                output_weight(self.model),
                batch.targets,
                token_loss,
                temperature=self.temperature,
                return_entropy=entropy != "none",
                workspace_bytes=self.workspace_bytes,
                weight_grad=head_main_grad(self.model),
                keep_mask=kept_tokens.select_rows(batch.of_rows, batch.rows),
                ids=None if ids is None else batch.local(ids),
                **self.vocabulary(),
            )
        return MicroBatchLoss(result.loss, sums, maxima, result.log_probs if exact is None else exact)

    def _exact_log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor | None:
        """Returns log-probs [r] that replace the values of the operator, and not its gradients; None for no
        replacement."""
        return None

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Returns the ranks whose losses add up. They include context-parallel ranks, which have the loss of their own
        tokens."""
        return self.ranks.dp_cp_group

    def loss_rows(self, batch: MicroBatch, column: Tensor) -> Tensor:
        """Returns the rows [r] of this context-parallel rank's tokens."""
        return batch.local(column)

    def all_rows(self, batch: MicroBatch, log_probs: Tensor) -> Tensor:
        return whole(log_probs, batch, self.ranks)


class LogitsHead(LmHead):
    """Head that calls rl_kernel.logp over the logits [r, V_local] of the response positions."""

    kind = operators.LOGITS

    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        return _values(
            rl_kernel.logp(
                self._raw_logits(self._hidden(batch, output)),
                batch.targets,
                temperature=self.temperature,
                return_entropy=entropy != "none",
                keep_mask=kept_tokens.select_rows(batch.of_rows, batch.rows),
                **self.vocabulary(),
            ),
            entropy,
            self._score_ids(batch, output, ids),
        )


class NativeHead(LmHead):
    """Head with Megatron's output layer and plain PyTorch (`slime.megatron_backend.step.native`), without rl_kernel."""

    kind = operators.NATIVE

    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        of_ids = self._score_ids(batch, output, ids)
        logits = compute_logits(self.model, output)
        logits = take(logits, GatheredRows.of(batch.rows, len(logits))).float()
        start, size = vocab_range(self.model)
        logits = native.mask_padding(logits, start, size)
        if (kept := kept_tokens.select_rows(batch.of_rows, batch.rows)) is None:
            return *native.log_probs_and_entropy(
                logits, batch.targets, temperature=self.temperature, entropy=entropy
            ), of_ids
        cut = native.cut_to(logits, native.make_keep_mask(kept, logits, start))
        values = native.entropies(logits, temperature=self.temperature, entropy=entropy)
        log_probs, _ = native.log_probs_and_entropy(
            cut, batch.targets, temperature=self.temperature, entropy="none"
        )
        return log_probs, values, of_ids


class ValueTokens(LmHead):
    """Head that returns the values of a reward model instead of log-probs: the value of the state before each response
    token."""

    kind = operators.VALUES

    def local_log_probs(
        self, batch: MicroBatch, output: Tensor, entropy: EntropyUse, ids: Tensor | None = None
    ) -> Values:
        return compute_values(self.model, self._hidden(batch, output)), None, None


def _values(out: Tensor | tuple[Tensor, ...], entropy: EntropyUse, of_ids: Tensor | None = None) -> Values:
    """Splits the result of an operator that returns the entropy and the log-probs of ids only if they were
    requested."""
    if isinstance(out, Tensor):
        return out, None, of_ids
    others = list(out[1:])
    values = others.pop(0) if entropy != "none" else None
    return out[0], values, others[0] if others else of_ids


def whole(per_token: Tensor, batch: MicroBatch, ranks: ParallelInfo) -> Tensor:
    """Maps [r, ...] per context-parallel rank to [R, ...] of the micro-batch on all ranks. Collective over these
    ranks.

    Each rank must compute the same loss from the result: the backward gives every rank the gradient of its own rows.
    """
    if batch.mine is None:
        return per_token
    gathered: Tensor = _Whole.apply(per_token, batch.mine, len(batch.sample_of_row), ranks.cp_group)
    return gathered


class _Whole(torch.autograd.Function):
    """Autograd function `zeros(R).index_copy(0, mine, x)`, summed over ranks. Each row comes from one rank, so the sums
    are exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mine: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine)
        out = x.new_zeros(rows, *x.shape[1:]).index_copy_(0, mine, x)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (mine,) = ctx.saved_tensors
        return upstream.index_select(0, mine), None, None, None
