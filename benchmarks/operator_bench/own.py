"""Our contenders: `linear_logp` and `linear_token_loss`, by workspace, rounding point, use of the entropy, and target
of the weight gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rl_kernel
from operator_bench.pairs import DEFAULT_WORKSPACE_MIB
from operator_bench.problem import IDS, Contender, MakeLoss, Outputs, Problem
from operator_bench.timing import MIB

UNLIMITED = float("inf")
WORKSPACES_MIB = {"linear_logp": (UNLIMITED, 1536, 512, 256), "linear_token_loss": (512, 1536, UNLIMITED)}
ROUNDING = {"bf16": "bfloat16", "fp32": "float32"}
ON_TOP = {"none": "", "metric": " +entropy", "gradient": " +entropy grad", "ids": f" +{IDS} ids"}
"""Results of a call in addition to log-probs: the entropy, its gradient, or log-probs of given ids with gradients."""

UPSTREAM = {"gradient": "entropy", "ids": "ids"}
"""Use of the entropy or of ids -> kind of `Problem.upstream`, if it is not "plain"."""


def workspace_label(mib: float) -> str:
    if mib == UNLIMITED:
        return "unlimited"
    return f"{mib / 1024:g}GiB" if mib >= 1024 else f"{mib:g}MiB"


def own_contenders(
    operators: Sequence[str],
    workspaces: Sequence[float] | None = None,
    losses: Mapping[str, MakeLoss] | None = None,
) -> list[Contender]:
    """Returns all rows of the named operators. `workspaces` (MiB) replaces the standard lists. `losses` has more losses
    of linear_token_loss, by name."""
    found = []
    if "linear_logp" in operators:
        found += [_logp_row(None, "bf16"), _logp_row(None, "bf16", "metric"), _logp_row(None, "fp32")]
        found.append(
            Contender(
                f"linear_top forward bf16, {IDS} ids",
                "linear_logp",
                top_step,
                phase="forward",
                upstream="ids",
            )
        )
        found += _logp_rows(workspaces or WORKSPACES_MIB["linear_logp"])
    if "linear_token_loss" in operators:
        found += _token_loss_rows(workspaces or WORKSPACES_MIB["linear_token_loss"], losses or {})
    return found


def _logp_row(mib: float | None, rounding: str, entropy: str = "none") -> Contender:
    """Returns the row of forward and backward in a workspace of `mib`; None means the forward without a workspace."""
    what = "forward" if mib is None else workspace_label(mib)
    return Contender(
        f"linear_logp {what} {rounding}{ON_TOP[entropy]}",
        "linear_logp",
        partial(logp_step, mib=mib, rounding=rounding, entropy=entropy),
        phase="forward" if mib is None else "train",
        upstream=UPSTREAM.get(entropy, "plain"),
        entropy="none" if entropy == "ids" else entropy,
        workspace_mib=mib,
    )


def _logp_rows(workspaces: Sequence[float]) -> list[Contender]:
    detail = _detail(workspaces)
    rows = [_logp_row(mib, "bf16") for mib in workspaces]
    rows += [_logp_row(detail, "bf16", entropy) for entropy in ("metric", "gradient", "ids")]
    wide = {max(workspaces), detail}
    return rows + [_logp_row(mib, "fp32") for mib in sorted(wide, reverse=True)]


def _token_loss_row(
    mib: float,
    main_grad: bool,
    rounding: str = "bf16",
    entropy: str = "none",
    loss: str | None = None,
    make_loss: MakeLoss | None = None,
) -> Contender:
    where = "main_grad" if main_grad else ".grad"
    plain = f"linear_token_loss {workspace_label(mib)} {rounding} {where}"
    gradient = UPSTREAM.get(entropy, "plain")
    return Contender(
        plain + ON_TOP[entropy] + ("" if loss is None else f" {loss}_loss"),
        "linear_token_loss",
        partial(token_loss_step, mib=mib, main_grad=main_grad, rounding=rounding, entropy=entropy, loss=loss),
        upstream=loss or gradient,
        entropy="none" if entropy == "ids" else entropy,
        workspace_mib=mib,
        main_grad=main_grad,
        make_loss=make_loss,
    )


def _token_loss_rows(workspaces: Sequence[float], losses: Mapping[str, MakeLoss]) -> list[Contender]:
    detail = _detail(workspaces)
    rows = [_token_loss_row(mib, main_grad) for mib in workspaces for main_grad in (True, False)]
    for main_grad in (True, False):
        rows += [_token_loss_row(detail, main_grad, entropy=entropy) for entropy in ("metric", "gradient")]
    rows.append(_token_loss_row(detail, True, loss="grpo"))
    rows.append(_token_loss_row(detail, True, entropy="ids"))
    rows += [_token_loss_row(detail, True, loss=name, make_loss=make) for name, make in losses.items()]
    rows.append(_token_loss_row(detail, True, rounding="fp32"))
    return rows


def _detail(workspaces: Sequence[float]) -> float:
    """Returns the workspace in which the variants (rounding, entropy, losses) are measured."""
    return DEFAULT_WORKSPACE_MIB if DEFAULT_WORKSPACE_MIB in workspaces else workspaces[0]


def _options(rounding: str, entropy: str, mib: float | None) -> dict[str, Any]:
    workspace = {} if mib is None else {"workspace_bytes": 2**62 if mib == UNLIMITED else int(mib * MIB)}
    return dict(
        logits_dtype=ROUNDING[rounding], return_entropy=entropy in ("metric", "gradient"), **workspace
    )


def logp_step(problem: Problem, *, mib: float | None, rounding: str, entropy: str) -> Callable[[], Outputs]:
    options = _options(rounding, entropy, mib)

    def step() -> Outputs:
        with torch.set_grad_enabled(mib is not None):
            ids = problem.ids if entropy == "ids" else None
            found = rl_kernel.linear_logp(problem.hidden, problem.weight, problem.targets, ids=ids, **options)
        values = found if isinstance(found, tuple) else (found,)
        if mib is not None:
            used = 2 if entropy in UPSTREAM else 1
            of_second = problem.ids_gain if entropy == "ids" else problem.entropy_gain
            torch.autograd.backward(values[:used], [problem.gain, of_second][:used])
        return Outputs(values[0], values[1] if entropy in ("metric", "gradient") else None)

    return step


def top_step(problem: Problem) -> Callable[[], Outputs]:
    def step() -> Outputs:
        log_probs, _ = rl_kernel.linear_top(
            problem.hidden, problem.weight, problem.targets, problem.ids.shape[1], logits_dtype="bfloat16"
        )
        return Outputs(log_probs)

    return step


def token_loss_step(
    problem: Problem, *, mib: float, main_grad: bool, rounding: str, entropy: str, loss: str | None
) -> Callable[[], Outputs]:
    def loss_of(
        log_probs: Tensor, entropies: Tensor | None, rows: slice, id_log_probs: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if loss is not None:
            return problem.losses[loss](log_probs, rows)
        total = (log_probs * problem.gain[rows]).sum()
        if entropy == "gradient":
            assert entropies is not None
            total = total + (entropies * problem.entropy_gain[rows]).sum()
        if id_log_probs is not None:
            total = total + (id_log_probs * problem.ids_gain[rows]).sum()
        return total, {}

    options = _options(rounding, entropy, mib) | {"weight_grad": problem.main_grad if main_grad else None}

    options |= {"ids": problem.ids if entropy == "ids" else None}

    def step() -> Outputs:
        result = rl_kernel.linear_token_loss(
            problem.hidden, problem.weight, problem.targets, loss_of, **options
        )
        torch.autograd.backward(result.loss)
        return Outputs(result.log_probs, result.entropy)

    return step
