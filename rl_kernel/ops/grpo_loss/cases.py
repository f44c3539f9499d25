"""Named shapes and options of `grpo_loss`, their inputs and the float64 formula. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_kernel.ops.ratio_kl.cases import formula as ratio_kl_formula

CLIP_BOUNDS = (0.8, 0.9, 1.2, 1.3)
"""The clip bounds that OPTIONS use."""


@dataclass(frozen=True)
class GrpoLossCase:
    """A shape: N tokens of three samples. A fifth of the tokens is masked out and holds NaN.

    Tokens whose ratio equals a clip bound in float32 are masked out too: in float64 they may be on either side.
    """

    name: str
    tokens: int

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> dict[str, Tensor]:
        """Returns every column of `grpo_loss`, [N], with a bool mask and each sample's mask sum as denominators."""
        generator = torch.Generator().manual_seed(seed)
        new = -3 * torch.rand(self.tokens, generator=generator)
        near, far, gain, spread = torch.randn(4, self.tokens, generator=generator)
        mask = torch.rand(self.tokens, generator=generator) < 0.8
        columns = {
            "log_probs": new,
            "old_log_probs": new + 0.3 * near,
            "advantages": gain,
            "ref_log_probs": new + far,
            "entropy": spread.abs(),
            "tis_weights": (0.3 * near).exp().clamp(max=2),
        }
        log_ratio = new.to(dtype).double() - columns["old_log_probs"].to(dtype).double()
        for bound in CLIP_BOUNDS:
            mask &= (log_ratio.exp() - bound).abs() > 1e-5
        columns = {name: torch.where(mask, value, float("nan")).to(dtype) for name, value in columns.items()}
        sample = torch.arange(self.tokens) * 3 // max(self.tokens, 1)
        sums = torch.zeros(3).index_add_(0, sample, mask.float()).clamp(min=1)
        columns |= {"mask": mask, "denominators": sums[sample]}
        return {name: value.to(device) for name, value in columns.items()}


CASES = (
    GrpoLossCase("no_tokens", 0),
    GrpoLossCase("one_token", 1),
    GrpoLossCase("one_program", 1500),
    GrpoLossCase("one_full_program", 4096),
    GrpoLossCase("several_programs", 5000),
)
"""Cases that are small enough for Triton's interpreter. A single program takes up to 4096 tokens; several programs take
1024 each."""

LARGE = (GrpoLossCase("many_programs", 2**20), GrpoLossCase("many_programs_ragged", 2**20 + 13))

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_higher": {"eps_clip": 0.1, "eps_clip_high": 0.3},
    "dual_clip": {"eps_clip_c": 1.2},
    "kl_k1": {"kl_coef": 0.1, "kl_type": "k1"},
    "kl_k2_unbiased": {"kl_coef": 0.1, "kl_type": "k2", "unbiased_kl": True},
    "kl_k3": {"kl_coef": -0.1, "kl_type": "k3"},
    "kl_k3_unbiased": {"kl_coef": 0.2, "kl_type": "k3", "unbiased_kl": True},
    "kl_low_var": {"kl_coef": 0.1, "kl_type": "low_var_kl", "unbiased_kl": True},
    "entropy": {"entropy_coef": 0.05},
    "everything": {
        "eps_clip": 0.1,
        "eps_clip_high": 0.3,
        "eps_clip_c": 1.2,
        "kl_coef": 0.1,
        "kl_type": "low_var_kl",
        "entropy_coef": -0.05,
    },
}


def formula(
    c: dict[str, Tensor],
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k1",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the objective and its metrics token by token in float64, from all columns of `GrpoLossCase.inputs`."""
    mask = c["mask"] != 0
    d = {name: torch.where(mask, value.double(), 0) for name, value in c.items()}
    high = eps_clip if eps_clip_high is None else eps_clip_high
    columns = (d["log_probs"], d["old_log_probs"], d["ref_log_probs"], mask)
    ratio, kl = ratio_kl_formula(*columns, kl_type, unbiased=unbiased_kl)
    plain = -ratio * d["advantages"]
    bounded = -ratio.clamp(1 - eps_clip, 1 + high) * d["advantages"]
    pg = torch.maximum(plain, bounded)
    if eps_clip_c is not None:
        pg = torch.where(d["advantages"] < 0, torch.minimum(pg, -eps_clip_c * d["advantages"]), pg)
    pg = pg * d["tis_weights"]
    per_token = pg + kl_coef * kl - entropy_coef * d["entropy"]
    metrics = {
        "pg_loss": pg,
        "pg_clipfrac": (bounded > plain).double(),
        "ppo_kl": d["old_log_probs"] - d["log_probs"],
        "ratio": ratio,
        "kl_loss": kl,
    }
    loss = (per_token / d["denominators"])[mask].sum()
    return loss, {name: value.detach() for name, value in metrics.items()}
