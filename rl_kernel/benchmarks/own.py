"""Our contenders: `linear_logp` and `linear_token_loss`, by workspace, rounding point, use of the entropy, and where
the weight gradient goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_kernel.benchmarks.contender import Contender
from rl_kernel.benchmarks.problem import Outputs, Problem
from rl_kernel.benchmarks.timing import MIB

UNLIMITED = float("inf")
WORKSPACES_MIB = {"linear_logp": (UNLIMITED, 1536, 512, 256), "linear_token_loss": (512, 1536, UNLIMITED)}
DETAIL_WORKSPACE_MIB = 1536
"""Where the variants (rounding, entropy, losses) are measured."""
ROUNDING = {"bf16": "bfloat16", "fp32": "float32"}
ON_TOP = {"none": "", "metric": " +entropy", "gradient": " +entropy grad"}


def workspace_label(mib: float) -> str:
    if mib == UNLIMITED:
        return "unlimited"
    return f"{mib / 1024:g}GiB" if mib >= 1024 else f"{mib:g}MiB"


def workspace_bytes(mib: float) -> int:
    return 2**62 if mib == UNLIMITED else int(mib * MIB)


def own_contenders(operators: Sequence[str], workspaces: Sequence[float] | None = None) -> list[Contender]:
    """All rows of the named operators; `workspaces` (MiB) replaces the standard lists."""
    found = []
    if "linear_logp" in operators:
        found += [_forward_row("bf16"), _forward_row("bf16", "metric"), _forward_row("fp32")]
        found += _logp_rows(workspaces or WORKSPACES_MIB["linear_logp"])
    if "linear_token_loss" in operators:
        found += _token_loss_rows(workspaces or WORKSPACES_MIB["linear_token_loss"])
    return found


def _forward_row(rounding: str, entropy: str = "none") -> Contender:
    name = f"linear_logp forward {rounding}{ON_TOP[entropy]}"
    return Contender(name, "linear_logp", _forward(rounding, entropy != "none"), "forward", entropy=entropy)


def _logp_row(mib: float, rounding: str, entropy: str = "none") -> Contender:
    plain = f"linear_logp {workspace_label(mib)} {rounding}"
    return Contender(
        plain + ON_TOP[entropy],
        "linear_logp",
        logp_train(mib, rounding, entropy),
        upstream="entropy" if entropy == "gradient" else "plain",
        entropy=entropy,
        workspace_mib=mib,
    )


def _logp_rows(workspaces: Sequence[float]) -> list[Contender]:
    detail = _detail(workspaces)
    rows = [_logp_row(mib, "bf16") for mib in workspaces]
    rows += [_logp_row(detail, "bf16", entropy) for entropy in ("metric", "gradient")]
    wide = {max(workspaces), detail}
    return rows + [_logp_row(mib, "fp32") for mib in sorted(wide, reverse=True)]


def _token_loss_row(
    mib: float, main_grad: bool, rounding: str = "bf16", entropy: str = "none", grpo: bool = False
) -> Contender:
    where = "main_grad" if main_grad else ".grad"
    plain = f"linear_token_loss {workspace_label(mib)} {rounding} {where}"
    gradient = "entropy" if entropy == "gradient" else "plain"
    return Contender(
        plain + ON_TOP[entropy] + (" grpo_loss" if grpo else ""),
        "linear_token_loss",
        token_loss(mib, main_grad, rounding, entropy, grpo),
        upstream="grpo" if grpo else gradient,
        entropy=entropy,
        workspace_mib=mib,
        main_grad=main_grad,
    )


def _token_loss_rows(workspaces: Sequence[float]) -> list[Contender]:
    detail = _detail(workspaces)
    rows = [_token_loss_row(mib, main_grad) for mib in workspaces for main_grad in (True, False)]
    for main_grad in (True, False):
        rows += [_token_loss_row(detail, main_grad, entropy=entropy) for entropy in ("metric", "gradient")]
    rows.append(_token_loss_row(detail, True, grpo=True))
    rows.append(_token_loss_row(detail, True, rounding="fp32"))
    return rows


def _detail(workspaces: Sequence[float]) -> float:
    return DETAIL_WORKSPACE_MIB if DETAIL_WORKSPACE_MIB in workspaces else workspaces[0]


def _outputs(result: Tensor | tuple[Tensor, Tensor]) -> Outputs:
    return Outputs(*result) if isinstance(result, tuple) else Outputs(result)


def _forward(rounding: str, entropy: bool) -> Callable[[Problem], Callable[[], Outputs]]:
    def build(problem: Problem) -> Callable[[], Outputs]:
        from rl_kernel import linear_logp

        options: dict[str, Any] = dict(logits_dtype=ROUNDING[rounding], return_entropy=entropy)

        def step() -> Outputs:
            with torch.no_grad():
                return _outputs(linear_logp(problem.hidden, problem.weight, problem.targets, **options))

        return step

    return build


def logp_train(mib: float, rounding: str, entropy: str) -> Callable[[Problem], Callable[[], Outputs]]:
    def build(problem: Problem) -> Callable[[], Outputs]:
        from rl_kernel import linear_logp

        options: dict[str, Any] = dict(
            logits_dtype=ROUNDING[rounding],
            return_entropy=entropy != "none",
            workspace_bytes=workspace_bytes(mib),
        )

        def step() -> Outputs:
            out = _outputs(linear_logp(problem.hidden, problem.weight, problem.targets, **options))
            used = 2 if entropy == "gradient" else 1
            values = [value for value in (out.log_probs, out.entropy) if value is not None]
            torch.autograd.backward(values[:used], [problem.gain, problem.entropy_gain][:used])
            return out

        return step

    return build


def token_loss(
    mib: float, main_grad: bool, rounding: str, entropy: str, grpo: bool
) -> Callable[[Problem], Callable[[], Outputs]]:
    def build(problem: Problem) -> Callable[[], Outputs]:
        from rl_kernel import linear_token_loss

        def loss_of(
            log_probs: Tensor, entropies: Tensor | None, rows: slice
        ) -> tuple[Tensor, dict[str, Tensor]]:
            if grpo:
                return problem.grpo_loss(log_probs, rows)
            loss = (log_probs * problem.gain[rows]).sum()
            if entropy == "gradient":
                assert entropies is not None
                loss = loss + (entropies * problem.entropy_gain[rows]).sum()
            return loss, {}

        options: dict[str, Any] = dict(
            logits_dtype=ROUNDING[rounding],
            return_entropy=entropy != "none",
            workspace_bytes=workspace_bytes(mib),
            weight_grad=problem.main_grad if main_grad else None,
        )

        def step() -> Outputs:
            result = linear_token_loss(problem.hidden, problem.weight, problem.targets, loss_of, **options)
            torch.autograd.backward(result.loss)
            return Outputs(result.log_probs, result.entropy if entropy != "none" else None)

        return step

    return build
