"""Named shapes and options of `ratio_kl`, their inputs and the float64 formula. Tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RatioKlCase:
    """A shape: N tokens. A fifth of the tokens is masked out and holds NaN."""

    name: str
    tokens: int

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> dict[str, Tensor]:
        """Returns the columns [N] of `ratio_kl`, close to the old policy and farther from the reference, and a bool
        mask."""
        generator = torch.Generator().manual_seed(seed)
        new = -3 * torch.rand(self.tokens, generator=generator)
        near, far = torch.randn(2, self.tokens, generator=generator)
        mask = torch.rand(self.tokens, generator=generator) < 0.8
        columns = {"log_probs": new, "old_log_probs": new + 0.3 * near, "ref_log_probs": new + far}
        columns = {name: torch.where(mask, v, float("nan")).to(dtype) for name, v in columns.items()}
        return {name: value.to(device) for name, value in (columns | {"mask": mask}).items()}


CASES = (
    RatioKlCase("no_tokens", 0),
    RatioKlCase("one_token", 1),
    RatioKlCase("ragged", 333),
    RatioKlCase("one_block", 1024),
    RatioKlCase("blocks_and_a_rest", 2500),
)
"""Cases that are small enough for Triton's interpreter. The kernels' blocks hold 1024 tokens."""

LARGE = (RatioKlCase("many_blocks", 2**20), RatioKlCase("many_blocks_ragged", 2**20 + 13))

OPTIONS = tuple(
    {"kl_type": kl_type, "unbiased": unbiased}
    for kl_type in ("k1", "k2", "k3", "low_var_kl")
    for unbiased in (False, True)
)


def formula(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    kl_type: str,
    *,
    unbiased: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes the definition in float64, for log-ratios within +-80. Tokens that are not counted get ratio 1 and KL
    0."""
    new, old, ref = (torch.where(mask, v.double(), 0) for v in (log_probs, old_log_probs, ref_log_probs))
    ratio, lr = (new - old).exp(), new - ref
    kl = {"k1": lr, "k2": lr**2 / 2}.get(kl_type, torch.expm1(-lr) + lr)
    kl = kl * ratio if unbiased else kl
    return ratio, kl.clamp(-10, 10) if kl_type == "low_var_kl" else kl
