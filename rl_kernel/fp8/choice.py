"""The choice of the library that multiplies rounded matrices on a GPU: torch (cuBLAS) or DeepGEMM."""

from __future__ import annotations

import torch

from rl_kernel.checks import invalid

PRODUCTS = ("torch", "deepgemm")
"""The libraries. Triton kernels multiply where the chosen library has no product."""
_chosen = "torch"


def choose_products(name: str, device: torch.device) -> None:
    """Chooses the library for all layers of this process. A weight that was rounded before is rounded again.

    Raises ValueError if the library cannot run on the device.
    """
    global _chosen
    if name not in PRODUCTS:
        raise invalid("products", f"be one of {', '.join(PRODUCTS)}", name, "choose one of them")
    if name == "deepgemm":
        from rl_kernel.fp8.deepgemm import deepgemm_refusal

        if reason := deepgemm_refusal(device):
            raise invalid("products", "be torch here", name, reason)
    _chosen = name


def uses_deepgemm(dtype: torch.dtype) -> bool:
    """Returns True if DeepGEMM computes products with results in `dtype`. It has bfloat16 only."""
    return _chosen == "deepgemm" and dtype is torch.bfloat16
