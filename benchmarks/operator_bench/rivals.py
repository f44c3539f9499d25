"""Other implementations to compare with: plain and compiled PyTorch, the method of common RL trainers, and public
libraries that can be imported.

Each implementation is a few lines over its library's public functions. If a library is missing, or a call fails or runs
out of memory, its row has the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from operator_bench.own import logp_step, token_loss_step
from operator_bench.pairs import DEFAULT_WORKSPACE_MIB
from operator_bench.problem import Contender, Outputs, Problem
from rl_kernel.autograd import Context
from rl_kernel.checks import invalid
from rl_kernel.mode import using

LIGER_CHUNK_TOKENS = 512


def rival_contenders(names: str) -> list[Contender]:
    """Returns the contenders of `all`, `none`, or a comma-separated list of families (keys of RIVALS)."""
    return [contender for name in rival_families(names) for contender in RIVALS[name]]


def rival_families(names: str) -> list[str]:
    """Returns the families in the text. ValueError for an unknown family."""
    if names == "none":
        return []
    wanted = list(RIVALS) if names == "all" else names.split(",")
    for name in wanted:
        if name not in RIVALS:
            known = f"be all, none, or names of {', '.join(RIVALS)}"
            raise invalid("--rivals", known, repr(name), "separate names with commas")
    return wanted


def reference(problem: Problem, *, operator: str) -> Callable[[], Outputs]:
    """Returns a call of the operator's PyTorch reference, as in a run without kernels."""
    if operator == "linear_logp":
        call = logp_step(problem, mib=DEFAULT_WORKSPACE_MIB, rounding="bf16", entropy="none")
    else:
        call = token_loss_step(
            problem, main_grad=False, loss=None, mib=DEFAULT_WORKSPACE_MIB, rounding="bf16", entropy="none"
        )

    def step() -> Outputs:
        with using("off"):
            return call()

    return step


def plain_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Computes log-probs without an operator: logits, a float32 copy, and a log-softmax over it."""
    logits = F.linear(hidden, weight).float()
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def torch_plain(problem: Problem, *, compiled: bool = False) -> Callable[[], Outputs]:
    # The shapes are static. A trainer may compile for dynamic shapes, with slower code.
    log_probs_of = torch.compile(plain_log_probs, dynamic=False) if compiled else plain_log_probs

    def step() -> Outputs:
        log_probs = log_probs_of(problem.hidden, problem.weight, problem.targets)
        torch.autograd.backward(log_probs, problem.gain)
        return Outputs(log_probs)

    return step


class _NativeLogProb(torch.autograd.Function):
    """Computes log-probs from float32 logits [N, V], and overwrites the logits with their softmax for the backward. A
    vocabulary-parallel cross-entropy does the same on one process."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, targets: Tensor) -> Tensor:
        logits.sub_(logits.amax(1, keepdim=True))
        picked = logits.gather(1, targets[:, None])[:, 0]
        total = logits.exp_().sum(1)
        softmax = logits.div_(total[:, None])
        ctx.save_for_backward(softmax, targets)
        return picked - total.log()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        softmax, targets = ctx.saved_tensors
        d_logits = softmax.neg_()
        rows = torch.arange(len(targets), device=targets.device)
        d_logits[rows, targets] += 1
        return d_logits.mul_(grad[:, None]), None


class _NativeEntropy(torch.autograd.Function):
    """Computes the entropy of float32 logits [N, V], and keeps the logits and their softmax for the backward."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor) -> Tensor:
        top = logits.amax(1, keepdim=True)
        exps = (logits - top).exp_()
        total = exps.sum(1, keepdim=True)
        softmax = exps.div_(total)
        mean = (softmax * logits).sum(1, keepdim=True)
        ctx.save_for_backward(softmax, logits, mean)
        return (top + total.log() - mean)[:, 0]

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        softmax, logits, mean = ctx.saved_tensors
        d_logits: Tensor = (mean - logits).mul_(softmax).mul_(grad[:, None])
        return d_logits


def native(problem: Problem, *, entropy: str = "none") -> Callable[[], Outputs]:
    """Returns the method of common RL trainers: float32 logits and a copy for the softmax, optionally an entropy."""

    def step() -> Outputs:
        logits = F.linear(problem.hidden, problem.weight).float()
        log_probs = _NativeLogProb.apply(logits.clone(), problem.targets)  # type: ignore[no-untyped-call]
        entropies = None
        if entropy != "none":
            with torch.set_grad_enabled(entropy == "gradient"):
                entropies = _NativeEntropy.apply(logits)  # type: ignore[no-untyped-call]
        del logits
        if entropy == "gradient":
            torch.autograd.backward([log_probs, entropies], [problem.gain, problem.entropy_gain])
        else:
            log_probs.backward(problem.gain)
        return Outputs(log_probs, entropies)

    return step


def liger_grpo_forward(problem: Problem) -> Callable[[], Outputs]:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    padded = _one_more_row(problem.hidden.detach())

    def step() -> Outputs:
        with torch.no_grad():
            logits = F.linear(padded, problem.weight)[None]
            return Outputs(fused_selective_log_softmax(logits, problem.targets[None], 1.0)[0])

    return step


def liger_grpo(problem: Problem) -> Callable[[], Outputs]:
    """Returns Liger's Triton GRPO loss on full bf16 logits. Without old log-probs the ratio is 1, so with an advantage
    of 1 the loss of a token has the gradient of minus its log-prob."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    padded = _one_more_row(problem.hidden.detach()).requires_grad_()
    problem.leaves.append(padded)
    advantages = torch.ones(1, device=problem.device)
    options: dict[str, Any] = dict(temperature=1.0, beta=0.0, eps_low=0.2, eps_high=0.28, inplace=True)

    def step() -> Outputs:
        logits = F.linear(padded, problem.weight)[None]
        loss = triton_grpo_loss(logits, None, None, problem.targets[None], advantages, **options)[0]
        loss.backward(-problem.gain[None])
        assert padded.grad is not None
        return Outputs(d_hidden=padded.grad[:-1])

    return step


def liger_fused_linear_grpo(problem: Problem) -> Callable[[], Outputs]:
    """Returns Liger's chunked GRPO loss from hidden states. Each token is a separate sequence, for token advantages."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, chunk_size=LIGER_CHUNK_TOKENS, loss_type="bnpo", temperature=1.0
    )
    targets = problem.targets[:, None]
    mask = torch.ones_like(targets, dtype=torch.float32)
    tokens = float(len(targets))

    def step() -> Outputs:
        loss = loss_of(problem.hidden[:, None], problem.weight, targets, mask, problem.gain)[0]
        (loss * -tokens).backward()
        return Outputs()

    return step


def cut_cross_entropy(problem: Problem, **options: Any) -> Callable[[], Outputs]:
    from cut_cross_entropy import linear_cross_entropy

    def step() -> Outputs:
        loss = linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets, reduction="none", **options
        )
        loss.backward(-problem.gain.to(loss.dtype))
        return Outputs(-loss)

    return step


def _one_more_row(hidden: Tensor) -> Tensor:
    """Appends a row, because Liger's GRPO kernels drop the last row of the logits."""
    return torch.cat([hidden, hidden[:1]])


RIVALS: dict[str, list[Contender]] = {
    "reference": [
        Contender(f"{name} reference", "rival", partial(reference, operator=name), against=name)
        for name in ("linear_logp", "linear_token_loss")
    ],
    "torch": [Contender("torch fp32", "rival", torch_plain)],
    "compile": [Contender("torch compile", "rival", partial(torch_plain, compiled=True))],
    "native": [
        Contender("native", "rival", native),
        Contender("native +entropy", "rival", partial(native, entropy="metric"), entropy="metric"),
        Contender(
            "native +entropy grad",
            "rival",
            partial(native, entropy="gradient"),
            entropy="gradient",
            upstream="entropy",
        ),
    ],
    "liger": [
        Contender("liger grpo forward", "rival", liger_grpo_forward, phase="forward"),
        Contender("liger grpo", "rival", liger_grpo),
        Contender("liger fused linear grpo", "rival", liger_fused_linear_grpo),
    ],
    "cce": [
        Contender("cce (filters gradients)", "rival", cut_cross_entropy),
        Contender("cce exact", "rival", partial(cut_cross_entropy, filter_eps=None)),
    ],
}
"""Families of rivals, by their names in `--rivals`."""
