"""What takes part in the comparison of the linear operators: one way to get log-probs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rl_kernel.benchmarks.problem import Outputs, Problem


@dataclass(frozen=True)
class Contender:
    """`build(problem)` gives the call to time; an ImportError there says that the library is missing.

    operator: one of ours, or "rival".
    phase: "forward" (no gradients; the yardstick is one product) or "train" (three products).
    upstream: which gradients the call sends back (`Problem.upstream`).
    entropy: "none", "metric" (computed, no gradient) or "gradient".
    workspace_mib: the bound it was given; infinity for none; None where there is no such knob.
    main_grad: the weight gradient goes to `Problem.main_grad` instead of `.grad`.
    against: the one operator of ours that a rival is held against; None: every one that does the same.
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

    @property
    def products(self) -> int:
        return 1 if self.phase == "forward" else 3
