"""Functions whose result for a row has the same bits on every machine, for any other rows and any number of threads.

Two rules give this property. First, element-wise steps are only those that IEEE 754 rounds correctly: sums, products,
quotients, square roots, comparisons, powers of two. A library's exponential is not such a step, because a vector and
its tail may run different code. Second, sums over many elements are sums of whole numbers below 2**53 in float64. They
are exact, so that their order does not matter (Ozaki et al. 2012, "Error-free transformations of matrix
multiplication").

All work is in float64. A result that is rounded to float32 at the end is more accurate than that of a plain float32
operator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FRACTION_BITS = 34
"""Fraction bits per term of `sum_fractions`."""
MOST_TERMS = 2**18
"""Largest number of terms in a sum of fractions: MOST_TERMS * 2**FRACTION_BITS is below 2**53."""
SLICE_BITS = 18
"""Bits per slice of a factor, see `slices`."""
MOST_PRODUCTS = 2**16
"""Largest number of products of slices in one sum: MOST_PRODUCTS * 2**(2 * SLICE_BITS) is below 2**53."""
_MANTISSA_BITS, _BIAS = 52, 1023
_LN2_HIGH = 0x162E42FEE00000 * 2.0**-53
"""The first 32 bits of log(2). Their product with a whole number below 2**20 is exact."""
_LN2_LOW = 1.90821492927058770002e-10
_HALF_PI_HIGH, _HALF_PI_LOW = 1.57079632673412561417, 6.07710050650619224932e-11
"""pi / 2 as the sum of two numbers. The first number has 33 bits."""


def power_of_two(exponent: Tensor) -> Tensor:
    """Returns `2.0 ** exponent` in float64, exactly, for whole numbers from -1022 to 1023."""
    bits = exponent.to(torch.int64) + _BIAS << _MANTISSA_BITS
    return bits.view(torch.float64)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Evaluates a polynomial by Horner's rule. The coefficient of the highest power comes first."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x
        total = total + coefficient
    return total


def exp(x: Tensor) -> Tensor:
    """Returns `x.exp()` for float64 x up to 700, with a relative error below 1e-15; 0 below -700 and for -inf."""
    small = x < -700
    x = torch.where(small, torch.zeros_like(x), x)
    doublings = (x * (1 / math.log(2))).round()
    rest = x - doublings * _LN2_HIGH
    rest = rest - doublings * _LN2_LOW
    value = _polynomial(rest, [1 / math.factorial(k) for k in range(13, -1, -1)])
    finite = torch.where(doublings.isnan(), torch.zeros_like(doublings), doublings.clamp(-1022, 1023))
    return torch.where(small, torch.zeros_like(value), value * power_of_two(finite))


def log(x: Tensor) -> Tensor:
    """Returns `x.log()` for normal positive float64 x. The error is below 1e-15: absolute for x near 1, relative
    elsewhere."""
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
    """Returns `(x.cos(), x.sin())` for float64 x with abs(x) below 1e6, with an error below 1e-14."""
    doublings = (x * (2 / math.pi)).round()
    rest = x - doublings * _HALF_PI_HIGH
    rest = rest - doublings * _HALF_PI_LOW
    square = rest * rest
    even = _polynomial(square, [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)])
    odd = rest * _polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1)])
    quarter = doublings.to(torch.int64) & 3
    swapped = quarter % 2 == 1
    cos, sin = torch.where(swapped, odd, even), torch.where(swapped, even, odd)
    cos = torch.where((quarter == 1) | (quarter == 2), -cos, cos)
    return cos, torch.where(quarter >= 2, -sin, sin)


def sum_fractions(x: Tensor) -> Tensor:
    """Returns `x.sum(-1)` for float64 x in [0, 1], with each term rounded to a multiple of 2**-34.

    Raises ValueError for more than 2**18 terms, whose sum might be rounded.
    """
    if x.shape[-1] > MOST_TERMS:
        raise ValueError(f"terms must be at most {MOST_TERMS}, got {x.shape[-1]}; the sum would be rounded")
    whole: Tensor = (x * 2.0**FRACTION_BITS).round().sum(-1)
    return whole * 2.0**-FRACTION_BITS


def exponents(x: Tensor) -> Tensor:
    """Returns, for each row of the last dimension, the least whole e with `abs(x) < 2 ** e` for the row's largest
    element. The last dimension keeps size 1. The result is 0 for a row of zeros and for a row that is not finite."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest)[1].to(torch.int64)
    return torch.where(largest.isfinite(), exponent, torch.zeros_like(exponent))


def slices(x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float64 x into whole numbers (high, low): `(high + low * 2**-18) * 2**(exponent - 18)` equals x, up to
    2**(exponent - 37). Both are at most 2**18 in size. A number that is not finite becomes NaN."""
    scaled = x * power_of_two(SLICE_BITS - exponent)
    high = scaled.round()
    return high, ((scaled - high) * 2.0**SLICE_BITS).round()


def product(a: Tensor, b: Tensor, exponent: Tensor | None = None) -> Tensor:
    """Returns `a @ b.mT` in float64, as sums of exact products of slices: a [..., M, K] and b [..., N, K].

    An element of the result depends only on its row of a and its row of b. Its bits are those of `(hh * 2**18 + hl +
    lh) * scale`, where the three sums are exact. The omitted part is 2**-36 of the product of the largest elements of
    both rows.

    `exponent` [..., N, 1] replaces the exponents of b's rows. It is needed if the slices must not depend on the
    elements of b (a sum over keys, where each query sees a part of the keys). Then |b| must be below 2**exponent.
    Raises ValueError for K above 2**16, whose sums might be rounded.
    """
    if a.shape[-1] > MOST_PRODUCTS:
        raise ValueError(
            f"products of one sum must be at most {MOST_PRODUCTS}, got {a.shape[-1]}; the sum would be rounded"
        )
    a_exponents = exponents(a)
    b_exponents = exponents(b) if exponent is None else exponent
    (a_high, a_low), (b_high, b_low) = slices(a.double(), a_exponents), slices(b.double(), b_exponents)
    high = a_high @ b_high.mT
    cross = torch.cat((a_high, a_low), -1) @ torch.cat((b_low, b_high), -1).mT
    total = high * 2.0**SLICE_BITS + cross
    return total * power_of_two(a_exponents - 3 * SLICE_BITS) * power_of_two(b_exponents.mT)
