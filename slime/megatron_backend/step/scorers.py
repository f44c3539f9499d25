"""Scorers: each scorer fills one column of a rank's data by a pass of a model without gradient, before training.

    Scorer.fill(data)        in the order of slime.roles.get_passes

A pass of a frozen model covers all samples. Old log-probs may come from the first optimizer step instead
(`OldLogProbs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from slime import operators
from slime.algo.losses import loss_for
from slime.algo.needs import before_first_step, draws_in_loss, needs_old_log_probs
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.data import top_tokens
from slime.data.packing import MicroBatch
from slime.data.rank_data import RankData
from slime.megatron_backend.lora.install import without_adapters
from slime.megatron_backend.model.gpt import get_parts, unwrapped, vocab_range
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.batches import Batches
from slime.megatron_backend.step.heads import build_head
from slime.megatron_backend.step.heads.head import LmHead, whole
from slime.megatron_backend.step.pipeline import run_forward, tensors_from_last_stage
from slime.megatron_backend.step.values import values_per_token
from slime.roles import POLICY, TEACHER, Role, get_roles
from slime.tracking.timers import Timers
from slime.types import TrainData

PerToken = Callable[[MicroBatch, Tensor], Tensor]
"""Maps (micro-batch, the last stage's output) to one number per response token, [R], or several, [R, width]."""


class Scorer(Protocol):
    """The interface of a scorer; one scorer per role with a pass. `role.column` names the column that it fills."""

    role: Role

    def fill(self, data: RankData) -> None:
        """Fills the column, unless the data or a later step provide it. Collective over tensor-, context- and
        pipeline-parallel ranks."""
        ...


@torch.no_grad()
def compute_column(
    model: nn.Module,
    info: ParallelInfo,
    per_token: PerToken,
    batches: Iterable[MicroBatch],
    count: int,
    response_lengths: list[int],
    samples: Iterable[int] | None = None,
    width: int = 0,
) -> dict[int, Tensor]:
    """Returns `per_token` of the samples by `model`: fp32 tensors [response length] or, with a `width`, [response
    length, width] by sample.

    `count` micro-batches hold `samples`, which are all samples of the rank if None. Collective over tensor-, context-
    and pipeline-parallel ranks.
    """

    def parts(batch: MicroBatch, output: Tensor) -> list[tuple[int, Tensor]]:
        return list(zip(batch.samples, batch.split(per_token(batch, output), response_lengths), strict=True))

    kept = run_forward(model, info, batches, count, parts)
    found = dict(pair for of_batch in kept for pair in of_batch)
    wanted = range(len(response_lengths)) if samples is None else samples
    return tensors_from_last_stage(info, found, {i: response_lengths[i] for i in wanted}, width)


def make_log_probs(head: LmHead) -> PerToken:
    """Returns a function for log-probs by the head's model, in nats."""
    return lambda batch, output: head.log_probs(batch, output, "none")[0]


def make_top(head: LmHead, count: int, policy: nn.Module) -> PerToken:
    """Returns a function for log-probs by the head's model, then the `count` likeliest ids and their log-probs. An id
    that the policy does not have becomes NONE. The result is [R, 1 + 2 * count] fp32, which holds ids below 2**24
    exactly."""

    def per_token(batch: MicroBatch, output: Tensor) -> Tensor:
        log_probs, top = head.top(batch, output, count)
        known = (top.ids >= 0) & (top.ids < vocab_range(policy)[1])  # on the last stage, which has the head
        ids, values = torch.where(known, top.ids, top_tokens.NONE), torch.where(known, top.log_probs, 0)
        return whole(torch.cat([log_probs[:, None], ids.float(), values], 1), batch, head.ranks)

    return per_token


class Pass:
    """A pass of a role's model over samples of a rank. `of_policy`: the model is the policy, which may replay experts.
    `width`: numbers per token, 0 for a single number without its own axis."""

    def __init__(
        self,
        role: Role,
        config: Config,
        hooks: Hooks,
        model: nn.Module,
        per_token: PerToken,
        info: ParallelInfo,
        batches: Batches,
        timers: Timers,
        *,
        of_policy: bool = False,
        width: int = 0,
    ) -> None:
        self.role, self.model, self.of_policy, self.width = role, model, of_policy, width
        self._config, self._hooks = config, hooks
        self._per_token, self._info, self._batches, self._timers = per_token, info, batches, timers

    def over(self, data: RankData, micro_batches: list[list[int]]) -> dict[int, Tensor]:
        """Returns the column, by sample of `micro_batches`. Calls --custom-megatron-before-log-prob-hook-path first."""
        with self._timers.measure(self.role.timer):
            if self.role.head == "lm":
                model = get_parts(self.model)
                self._hooks.call("custom_megatron_before_log_prob_hook_path", model, self.role.prefix)
            with self._as_role():
                return self._column(data, micro_batches)

    def _as_role(self) -> AbstractContextManager[None]:
        """Makes the model the role's model in the block: it may be the policy's model without its adapters."""
        if self.role.of_base(self._config):
            return without_adapters(unwrapped(self.model))
        return nullcontext()

    def _column(self, data: RankData, micro_batches: list[list[int]]) -> dict[int, Tensor]:
        return compute_column(
            self.model,
            self._info,
            self._per_token,
            self._batches.pack_pass(data, micro_batches, policy=self.of_policy),
            len(micro_batches),
            data.response_lengths,
            sorted(i for samples in micro_batches for i in samples),
            self.width,
        )


class FrozenScorer:
    """Fills the column of a role from a pass over all samples."""

    def __init__(self, its_pass: Pass) -> None:
        self.role, self._pass = its_pass.role, its_pass

    def fill(self, data: RankData) -> None:
        data.fill(self.role.column, self._pass.over(data, data.micro_batches))


class TopScorer:
    """Fills the column of a role, and the ids and log-probs of its model's likeliest tokens. The ids and log-probs stay
    on the host until training."""

    def __init__(self, its_pass: Pass) -> None:
        self.role, self._pass = its_pass.role, its_pass

    def fill(self, data: RankData) -> None:
        found = self._pass.over(data, data.micro_batches)
        count = (self._pass.width - 1) // 2
        parts = {i: x.split([1, count, count], 1) for i, x in found.items()}
        data.fill(self.role.column, {i: log_probs[:, 0] for i, (log_probs, _, _) in parts.items()})
        ids, log_probs = top_tokens.TEACHER
        data.fill(ids, {i: x.int().cpu() for i, (_, x, _) in parts.items()})
        data.fill(log_probs, {i: x.cpu() for i, (_, _, x) in parts.items()})


class OldLogProbs:
    """The scorer of the policy: log-probs before the rollout's first optimizer step.

        extra pass over the samples of later steps -> fill -> [first step] -> add -> complete -> data["old_log_probs"]

    The first step trains the old policy, so that its log-probs, detached, are the old ones. So the pass covers all
    samples only if other code needs them before that step or a training pass draws dropout. In a rollout with one step,
    there is no pass.
    """

    def __init__(self, its_pass: Pass, config: Config, info: ParallelInfo) -> None:
        self.role, self.its_pass = its_pass.role, its_pass
        self._config, self._info = config, info
        self._later: dict[int, Tensor] = {}
        self._first: dict[int, Tensor] = {}

    def fill(self, data: RankData) -> None:
        """Fills the column, or starts to wait for the first step."""
        if self._config.off_policy.use_rollout_logprobs:
            data["old_log_probs"] = data["rollout_log_probs"]
            if needs_old_log_probs(self._config):
                data.fill("log_probs", self.its_pass.over(data, data.micro_batches))
        elif before_first_step(self._config, len(data.step_sizes)):
            data.fill("old_log_probs", self.its_pass.over(data, data.micro_batches))
            data["log_probs"] = data["old_log_probs"]  # advantage hooks read this name
        elif later := data.micro_batches[data.step_sizes[0] :]:
            self._later, self._first = self.its_pass.over(data, later), {}

    @property
    def known(self) -> Mapping[int, Tensor]:
        """Returns the log-probs that wait for the first step, by sample."""
        return self._later

    def wants(self, step_id: int) -> bool:
        return step_id == 0 and bool(self._later)

    def add(self, data: TrainData, batch: MicroBatch, log_probs: Tensor) -> None:
        """Adds the detached log-probs [R] of a micro-batch of the first step."""
        parts = batch.split(log_probs, data["response_lengths"])
        self._first |= zip(batch.samples, parts, strict=True)

    def complete(self, data: RankData) -> None:
        """Adds the columns `old_log_probs` and `log_probs` for all samples. Call it after the first step. Collective
        over the stages of a pipeline."""
        lengths = {i: n for i, n in enumerate(data.response_lengths) if i not in self._later}
        data.fill("old_log_probs", self._later | tensors_from_last_stage(self._info, self._first, lengths))
        data["log_probs"] = data["old_log_probs"]
        self._later, self._first = {}, {}


def build_scorers(
    config: Config,
    hooks: Hooks,
    models: Mapping[str, nn.Module],
    info: ParallelInfo,
    batches: Batches,
    timers: Timers,
) -> list[Scorer]:
    """Returns the scorers of a run in their order in a step. `models` has the models by the names of their roles."""
    found: list[Scorer] = []
    rewarded = loss_for(config.algorithm).rewarded
    for role in (role for role in get_roles(config) if rewarded or role is not POLICY):
        model = models[role.name]
        per_token: PerToken = partial(values_per_token, model, info)
        count = config.distillation.opd_top_k if role is TEACHER and draws_in_loss(config) else 0
        if role.head == "lm":
            head = build_head(config, operators.pass_head(config), model, info)
            per_token = make_top(head, count, models[POLICY.name]) if count else make_log_probs(head)
        its_pass = Pass(
            *(role, config, hooks, model, per_token, info, batches, timers),
            of_policy=role is POLICY,
            width=1 + 2 * count if count else 0,
        )
        frozen = TopScorer if count else FrozenScorer
        found.append(OldLogProbs(its_pass, config, info) if role is POLICY else frozen(its_pass))
    return found
