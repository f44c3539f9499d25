"""The choice of the library that multiplies rounded matrices on a GPU: torch (cuBLAS) or DeepGEMM."""

from __future__ import annotations

import torch

from rl_kernel.checks import invalid

PRODUCTS = ("torch", "deepgemm")
"""The libraries. Triton kernels multiply where the chosen library has no product."""
_chosen = "torch"


def products_refusal(name: str, device: torch.device) -> str | None:
    """Returns the reason why a library cannot multiply on a device, or None if it can. With `torch`, Triton multiplies
    where cuBLAS has no product."""
    if name == "torch":
        return None
    from rl_kernel.fp8.deepgemm import deepgemm_refusal

    return deepgemm_refusal(device)


def choose_products(name: str, device: torch.device) -> None:
    """Chooses the library for all layers of this process. A weight that was rounded before is rounded again.

    Raises ValueError if the library cannot run on the device.
    """
    global _chosen
    if name not in PRODUCTS:
        raise invalid("products", f"be one of {', '.join(PRODUCTS)}", name, "choose one of them")
    if reason := products_refusal(name, device):
        raise invalid("products", f"be torch on {device}", name, reason)
    _chosen = name


def uses_deepgemm(dtype: torch.dtype) -> bool:
    """Returns True if DeepGEMM computes products with results in `dtype`. It has bfloat16 only."""
    return _chosen == "deepgemm" and dtype is torch.bfloat16
