"""The problem of the linear operators: shapes, inputs, the true results in float64, and the record of a contender.

Legend: N tokens, H hidden, V vocabulary columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import rl_kernel
from rl_kernel.checks import invalid
from rl_kernel.ops.linear_logp.cases import LinearCase
from rl_kernel.ops.logp import cases as logp_cases

CHECKED_ROWS = 256
CHECKED_COLUMNS = 256
TRUTH_TOKENS = 512
"""Number of rows of float64 logits at a time: 600 MiB for the largest vocabulary."""
Upstream = tuple[Tensor, Tensor | None, Tensor | None]
"""Upstream gradients of the log-probs [N], the entropy [N] and the log-probs of the ids [N, K]."""
IDS, STRIDE = 64, 7919
"""Number of ids per token, and distance between two ids: a prime, so that the ids differ in every vocabulary."""
BlockLoss = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""`loss(log_probs, rows) -> (loss, metrics)`, the `token_loss` of `linear_token_loss` without the entropy."""
MakeLoss = Callable[[Tensor, Tensor, Tensor, float], BlockLoss]
"""`make(old_log_probs, advantages, mask, denominator)` makes the loss of a case from columns [N] and a token count."""
CLIP: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.28}


GPU_CASES = (
    LinearCase("T1", 796, 2048, 75968),
    LinearCase("T2", 1820, 2048, 75968),
    LinearCase("T3", 6827, 2048, 75968),
    LinearCase("Q4B-4k", 4096, 2560, 151936),
    LinearCase("Q4B-16k", 16384, 2560, 151936),
    LinearCase("Q8B-8k", 8192, 4096, 151936),
)
CPU_CASES = (LinearCase("tiny", 37, 16, 101), LinearCase("wide", 5, 8, 1000))


def select_cases(names: str | None, device: torch.device) -> list[LinearCase]:
    """Returns the cases of a comma-separated list; without a list, the cases for the device."""
    if names is None:
        return list(GPU_CASES if device.type == "cuda" else CPU_CASES)
    known = {case.name: case for case in (*GPU_CASES, *CPU_CASES)}
    wanted = names.split(",")
    for name in wanted:
        if name not in known:
            raise invalid("--cases", f"name {', '.join(known)}", repr(name), "separate names with commas")
    return [known[name] for name in wanted]


@dataclass
class Outputs:
    """Results of a contender's call, for the check. The default gradients are the gradients of the problem's leaves."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    d_hidden: Tensor | None = None


class Problem:
    """Inputs of a case: hidden ~ N(0, 1), weight ~ N(0, 0.02), random targets and upstream gradients.

    `gain` [N], `entropy_gain` [N] and `ids_gain` [N, K] are the upstream gradients of the log-probs, of the entropy,
    and of the log-probs of `ids` [N, K]. `leaves` are the tensors whose `.grad` a call may set.
    """

    def __init__(self, case: LinearCase, device: torch.device) -> None:
        self.case, self.device = case, device
        random = torch.Generator(device).manual_seed(0)
        tokens, hidden, vocab = case.tokens, case.hidden, case.vocab

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=random)

        self.hidden = normal(tokens, hidden, dtype=torch.bfloat16).requires_grad_()
        self.weight = normal(vocab, hidden, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        self.targets = torch.randint(vocab, (tokens,), device=device, generator=random)
        self.gain, self.entropy_gain = normal(tokens), normal(tokens)
        first = torch.randint(vocab, (tokens, 1), device=device, generator=random)
        self.ids = ((first + STRIDE * torch.arange(min(IDS, vocab), device=device)) % vocab).int()
        self.ids_gain = normal(*self.ids.shape)
        self.advantages = normal(tokens)
        self.mask = torch.rand(tokens, device=device, generator=random) > 0.1
        self.log_ratio = (torch.randint(4, (tokens,), device=device, generator=random) - 1.5) / 3
        self.leaves = [self.hidden, self.weight]
        self.truth = Truth(self)
        # Ratios of exp(+-0.17) and exp(+-0.5) are far from the clip bounds, so the rounding of a log-prob never decides
        # whether a token is clipped.
        self.old_log_probs = (self.truth.log_probs - self.log_ratio).float()
        self.denominator = float(self.mask.sum().clamp(min=1))
        self.losses: dict[str, BlockLoss] = {"grpo": self.grpo_loss}

    def add_loss(self, name: str, make: MakeLoss) -> None:
        """Adds a loss, whose `upstream` has this name."""
        self.losses[name] = make(self.old_log_probs, self.advantages, self.mask, self.denominator)

    @cached_property
    def logits(self) -> Tensor:
        """Output [N, V] of the reference product."""
        return torch.empty(self.case.tokens, self.case.vocab, device=self.device, dtype=torch.bfloat16)

    @cached_property
    def main_grad(self) -> Tensor:
        """Buffer [V, H] float32 of a training framework for the weight gradient."""
        return torch.zeros(self.weight.shape, device=self.device)

    def product(self) -> None:
        """Runs the reference product: a plain matrix product, the first of the three products of a training step."""
        torch.mm(self.hidden.detach(), self.weight.detach().t(), out=self.logits)

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def grpo_loss(self, log_probs: Tensor, rows: slice, **terms: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes `rl_kernel.grpo_loss` of these tokens, with clip-higher and a mean over the batch's counted
        tokens."""
        old, gain, mask = self.old_log_probs[rows], self.advantages[rows], self.mask[rows]
        return rl_kernel.grpo_loss(log_probs, old, gain, mask, self.denominator, **CLIP, **terms)

    def upstream(self, kind: str) -> Upstream:
        """Returns the upstream gradients of the log-probs and of the entropy for this kind of call, in float64."""
        gain = self.gain.double()
        if kind == "plain":
            return gain, None, None
        if kind == "entropy":
            return gain, self.entropy_gain.double(), None
        if kind == "ids":
            return gain, None, self.ids_gain.double()
        log_probs = self.truth.log_probs.clone().requires_grad_()
        torch.autograd.backward(self.losses[kind](log_probs, slice(None))[0])
        assert log_probs.grad is not None
        return log_probs.grad, None, None


@dataclass(frozen=True)
class Contender:
    """A contender. `build(problem)` returns the call to time; it raises ImportError if the library is missing.

    operator: one of our operators, or "rival".
    phase: "forward" (no gradients; the floor is one product) or "train" (three products).
    upstream: kind of the upstream gradients (`Problem.upstream`).
    entropy: "none", "metric" (computed, no gradient) or "gradient".
    workspace_mib: the memory bound; infinity means no bound; None if the contender has no such setting.
    main_grad: the weight gradient goes to `Problem.main_grad` instead of `.grad`.
    make_loss: the loss that `upstream` names, unless the problem has it.
    against: our operator with which a rival is compared; None means every operator that does the same work.
    """

    name: str
    operator: str
    build: Callable[[Problem], Callable[[], Outputs]]
    phase: str = "train"
    upstream: str = "plain"
    entropy: str = "none"
    workspace_mib: float | None = None
    main_grad: bool = False
    against: str | None = None
    make_loss: MakeLoss | None = None

    @property
    def products(self) -> int:
        return 1 if self.phase == "forward" else 3


class Truth:
    """Log-probs and entropy of all tokens, gradients of some rows of hidden and weight, all in float64."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        case, device = problem.case, problem.device
        count = min(CHECKED_ROWS, case.tokens)
        self.rows = torch.linspace(0, case.tokens - 1, count, device=device).long()
        is_target = torch.zeros(case.vocab, dtype=torch.bool, device=device)
        is_target[problem.targets] = True
        half = CHECKED_COLUMNS // 2
        drawn, other = is_target.nonzero()[:half, 0], (~is_target).nonzero()[:half, 0]
        self.columns, self.other = torch.cat([drawn, other]), slice(len(drawn), None)
        self.log_probs, self.entropy = self._forward()
        self._gradients: dict[str, tuple[Tensor, Tensor]] = {}

    def _forward(self) -> tuple[Tensor, Tensor]:
        weight = self.problem.weight.detach().double()
        hidden, targets = (
            t.detach().split(TRUTH_TOKENS) for t in (self.problem.hidden, self.problem.targets)
        )
        parts = [logp_cases.formula(h.double() @ weight.t(), t) for h, t in zip(hidden, targets, strict=True)]
        log_probs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        return log_probs, entropy

    def gradients(self, kind: str) -> tuple[Tensor, Tensor]:
        """Returns d_hidden of `rows` and d_weight of `columns` for an upstream gradient of this kind."""
        if kind not in self._gradients:
            hidden, weight = (t.detach().double() for t in (self.problem.hidden, self.problem.weight))
            upstream = self.problem.upstream(kind)
            every_row, every_column = (torch.arange(len(t), device=t.device) for t in (hidden, weight))
            d_hidden = self._d_logits(hidden, weight, self.rows, every_column, upstream) @ weight
            d_weight = self._d_logits(hidden, weight, every_row, self.columns, upstream).t() @ hidden
            self._gradients[kind] = d_hidden, d_weight
        return self._gradients[kind]

    def _d_logits(
        self, hidden: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, upstream: Upstream
    ) -> Tensor:
        gain, entropy_gain, ids_gain = upstream
        targets, some = self.problem.targets[rows], hidden[rows]
        logits = some @ weight[columns].t()
        log_p = logits - ((some * weight[targets]).sum(1) - self.log_probs[rows])[:, None]
        p = log_p.exp()
        grad = -p * gain[rows, None]
        if entropy_gain is not None:
            grad -= entropy_gain[rows, None] * p * (log_p + self.entropy[rows, None])
        grad += (targets[:, None] == columns[None]) * gain[rows, None]
        if ids_gain is not None:
            for ids, values in zip(self.problem.ids[rows].unbind(1), ids_gain[rows].unbind(1), strict=True):
                grad += ((ids[:, None] == columns[None]).double() - p) * values[:, None]
        return grad

    def errors(self, outputs: Outputs, kind: str | None, d_weight: Tensor | None) -> dict[str, float | None]:
        """Returns the largest absolute errors of log-probs (checked rows, all rows) and entropy, in nats, and relative
        errors |out - truth| / |truth| of the gradients. An error is absent without values, and None if not finite."""
        found: dict[str, float] = {}
        if outputs.log_probs is not None:
            off = (outputs.log_probs.detach().double() - self.log_probs).abs()
            found["log_prob"], found["log_prob_all"] = off[self.rows].max().item(), off.max().item()
        if outputs.entropy is not None:
            off = (outputs.entropy.detach().double() - self.entropy).abs()
            found["entropy"] = off[self.rows].max().item()
        if kind is not None:
            d_hidden = self.problem.hidden.grad if outputs.d_hidden is None else outputs.d_hidden
            want_hidden, want_weight = self.gradients(kind)
            if d_hidden is not None:
                found["d_hidden"] = _relative(d_hidden[self.rows], want_hidden)
            if d_weight is not None:
                part = d_weight[self.columns]
                found["d_weight"] = _relative(part, want_weight)
                if len(part[self.other]):
                    found["d_weight_other"] = _relative(part[self.other], want_weight[self.other])
        return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _relative(actual: Tensor, truth: Tensor) -> float:
    off = torch.linalg.vector_norm(actual.double() - truth)
    return float(off / torch.linalg.vector_norm(truth).clamp(min=1e-300))
