"""`rotary` in Triton: one kernel for both directions. Each program rotates a token's heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


@triton.jit(do_not_specialize=["POSITIONS"])
def rotate_kernel(
    X,
    COS,
    SIN,
    POSITIONS,
    OUT,
    token_stride,
    head_stride,
    heads,
    half,
    BACK: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotates both halves of a token's heads by the angles in the token's row, or in row PLACES[token]. BACK
    reverses the rotation. HEADS and HALF are powers of two, at least `heads` and `half`."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + token).to(tl.int64) if HAS_POSITIONS else token
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (lane < half)
    kind = X.dtype.element_ty
    cos = tl.load(COS + position * half + lane, lane < half, other=0.0).to(kind).to(tl.float32)
    sin = tl.load(SIN + position * half + lane, lane < half, other=0.0).to(kind).to(tl.float32)
    if BACK:
        sin = -sin
    at = X + token * token_stride + head * head_stride + lane
    x1 = tl.load(at, inside, other=0.0).to(tl.float32)
    x2 = tl.load(at + half, inside, other=0.0).to(tl.float32)
    to = OUT + token * heads * half * 2 + head * half * 2 + lane
    tl.store(to, (x1 * cos - x2 * sin).to(kind), inside)
    tl.store(to + half, (x2 * cos + x1 * sin).to(kind), inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool, positions: Tensor | None = None) -> Tensor:
    """Returns x [T, heads, D] rotated by the angles of its tokens, contiguous. `back` reverses the rotation. With
    `positions` [T], cos and sin [P, ...] are tables, and token t uses row `positions[t]`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        with torch.cuda.device_of(x):
            rotate_kernel[(tokens,)](
                x,
                cos,
                sin,
                cos if positions is None else positions,
                out,
                x.stride(0),
                x.stride(1),
                heads,
                size // 2,
                BACK=back,
                HAS_POSITIONS=positions is not None,
                HEADS=triton.next_power_of_2(heads),
                HALF=triton.next_power_of_2(size // 2),
                num_warps=WARPS,
            )
    return out
