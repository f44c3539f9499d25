"""Functions whose result for a row has the same bits on every machine, whatever the other rows and the threads.

Two things make them so. Element-wise steps are those that IEEE 754 rounds correctly: sums, products, quotients, square
roots, comparisons, powers of two. A library's exponential is none of them: a vector and its tail may take different
code. Sums over many elements are sums of whole numbers below 2**53 in float64. They are exact, so that their order does
not matter (Ozaki et al. 2012, "Error-free transformations of matrix multiplication").

All work is in float64. What is rounded to float32 at the end is better than a plain float32 operator's result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FRACTION_BITS = 34
"""Of each term of `sum_of_fractions`."""
MOST_TERMS = 2**18
"""Of one sum of fractions: MOST_TERMS * 2**FRACTION_BITS is below 2**53."""
SLICE_BITS = 18
"""Of each of the two slices of a factor, see `slices`."""
MOST_PRODUCTS = 2**16
"""Of one sum of products of slices: MOST_PRODUCTS * 2**(2 * SLICE_BITS) is below 2**53."""
_MANTISSA_BITS, _BIAS = 52, 1023
_LN2_HIGH = 0x162E42FEE00000 * 2.0**-53
"""The first 32 bits of log(2): their product with a whole number below 2**20 is exact."""
_LN2_LOW = 1.90821492927058770002e-10
_HALF_PI_HIGH, _HALF_PI_LOW = 1.57079632673412561417, 6.07710050650619224932e-11
"""pi / 2 as the sum of two numbers, the first with 33 bits."""


def power_of_two(exponent: Tensor) -> Tensor:
    """`2.0 ** exponent` in float64 for whole numbers from -1022 to 1023, exactly."""
    bits = exponent.to(torch.int64) + _BIAS << _MANTISSA_BITS
    return bits.view(torch.float64)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Horner's rule; the coefficient of the highest power comes first."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x
        total = total + coefficient
    return total


def exp(x: Tensor) -> Tensor:
    """`x.exp()` for float64 x up to 700, with a relative error below 1e-15; 0 below -700, also for -inf."""
    small = x < -700
    x = torch.where(small, torch.zeros_like(x), x)
    turns = (x * (1 / math.log(2))).round()
    rest = x - turns * _LN2_HIGH
    rest = rest - turns * _LN2_LOW
    value = _polynomial(rest, [1 / math.factorial(k) for k in range(13, -1, -1)])
    finite = torch.where(turns.isnan(), torch.zeros_like(turns), turns.clamp(-1022, 1023))
    return torch.where(small, torch.zeros_like(value), value * power_of_two(finite))


def log(x: Tensor) -> Tensor:
    """`x.log()` for normal positive float64 x, with an error below 1e-15 for x near 1 and relative elsewhere."""
    bits = x.view(torch.int64)
    exponent = (bits >> _MANTISSA_BITS) - _BIAS
    fraction = (bits & (1 << _MANTISSA_BITS) - 1 | _BIAS << _MANTISSA_BITS).view(torch.float64)
    high = fraction > math.sqrt(2)
    fraction = torch.where(high, fraction * 0.5, fraction)
    exponent = exponent + high.to(torch.int64)
    share = (fraction - 1) / (fraction + 1)
    series = _polynomial(share * share, [1 / k for k in range(23, 0, -2)])
    value = share * series
    value = value * 2
    value = value + exponent.double() * math.log(2)
    return torch.where(x > 0, value, torch.full_like(value, math.nan))


def cos_and_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """`(x.cos(), x.sin())` for float64 x below 1e6 in size, with an error below 1e-14."""
    turns = (x * (2 / math.pi)).round()
    rest = x - turns * _HALF_PI_HIGH
    rest = rest - turns * _HALF_PI_LOW
    square = rest * rest
    even = _polynomial(square, [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)])
    odd = rest * _polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1)])
    quarter = turns.to(torch.int64) & 3
    swapped = quarter % 2 == 1
    cos, sin = torch.where(swapped, odd, even), torch.where(swapped, even, odd)
    cos = torch.where((quarter == 1) | (quarter == 2), -cos, cos)
    return cos, torch.where(quarter >= 2, -sin, sin)


def sum_of_fractions(x: Tensor) -> Tensor:
    """`x.sum(-1)` for float64 x in [0, 1], each term rounded to a multiple of 2**-34.

    ValueError for more than 2**18 terms, whose sum might be rounded.
    """
    if x.shape[-1] > MOST_TERMS:
        raise ValueError(f"terms must be at most {MOST_TERMS}, got {x.shape[-1]}; the sum would be rounded")
    whole: Tensor = (x * 2.0**FRACTION_BITS).round().sum(-1)
    return whole * 2.0**-FRACTION_BITS


def exponents(x: Tensor) -> Tensor:
    """The least whole e with `abs(x) < 2 ** e` for the largest element of each row of the last dimension, which stays
    with size 1. 0 for a row of zeros and for one that is not finite."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest)[1].to(torch.int64)
    return torch.where(largest.isfinite(), exponent, torch.zeros_like(exponent))


def slices(x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """float64 x as whole numbers (high, low): `(high + low * 2**-18) * 2**(exponent - 18)`, up to 2**(exponent - 37).
    Both are at most 2**18 in size. A number that is not finite makes NaN."""
    scaled = x * power_of_two(SLICE_BITS - exponent)
    high = scaled.round()
    return high, ((scaled - high) * 2.0**SLICE_BITS).round()


def product(a: Tensor, b: Tensor, exponent: Tensor | None = None) -> Tensor:
    """`a @ b.mT` in float64: a [..., M, K] and b [..., N, K], as sums of exact products of slices.

    An element of the result depends on its row of a and its row of b alone. It has the bits of
    `(hh * 2**18 + hl + lh) * scale`, where the three sums are exact. What is left out is 2**-36 of the product of the
    largest elements of both rows.

    `exponent` [..., N, 1]: that of b's rows, if their slices must not depend on the elements that are there (a sum over
    keys, of which each query sees a part). Then |b| must be below 2**exponent.
    ValueError for K above 2**16, whose sums might be rounded.
    """
    if a.shape[-1] > MOST_PRODUCTS:
        raise ValueError(
            f"products of one sum must be at most {MOST_PRODUCTS}, got {a.shape[-1]}; the sum would be rounded"
        )
    of_a = exponents(a)
    of_b = exponents(b) if exponent is None else exponent
    (a_high, a_low), (b_high, b_low) = slices(a.double(), of_a), slices(b.double(), of_b)
    high = a_high @ b_high.mT
    cross = torch.cat((a_high, a_low), -1) @ torch.cat((b_low, b_high), -1).mT
    total = high * 2.0**SLICE_BITS + cross
    return total * power_of_two(of_a - 3 * SLICE_BITS) * power_of_two(of_b.mT)
