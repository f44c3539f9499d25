"""Numbers of few bits in small blocks that share a scale: MXFP8 and NVFP4, in plain PyTorch.

    mxfp8   codes e4m3, one power of two (e8m0) per 32 elements of a row     (OCP Microscaling Formats 1.0)
    nvfp4   codes e2m1, one e4m3 scale per 16 elements of a row, one float32 scale per tensor     (2509.25149)

A function returns the codes and scales as checkpoints and GPUs store them. GPUs of compute capability 10 multiply such
operands. This package has no kernel for them; its functions define the values.
"""

from rl_kernel.microscaling import mxfp8, nvfp4

__all__ = ["mxfp8", "nvfp4"]
