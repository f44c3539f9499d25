"""This child process of math_processes.py compares two expressions per line of standard input.

It is started by its path and imports nothing from slime. It prints "ready" once, then a line for each JSON line
[gold, answer, decimal]: "1" or "0", and the seconds of CPU time. The kernel enforces the limits, because SymPy can
spend hours inside one big-integer operation, where no Python signal handler runs. CPU time above the limit ends the
process (SIGXCPU), and memory above the limit raises MemoryError. Expressions are read as LaTeX only, because
math-verify's reader of plain expressions calls `eval`. Values are compared here with a relative tolerance, because
math-verify's tolerance is absolute.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy
import time

_MEMORY_LIMIT_BYTES = 2 << 30
_DIGITS = 60
_SAME = 1e-30
"""Relative tolerance for two exact values, computed with `_DIGITS` digits."""
_SAME_DECIMAL = 1.000001e-6
"""Relative tolerance for a rounded decimal and an exact value."""


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _close(first: sympy.Basic, second: sympy.Basic, tolerance: float) -> bool | None:
    """Returns True if two numbers are equal to a relative tolerance, or None if a value is not a finite number."""
    import sympy

    first, second = first.doit(), second.doit()  # without doit, log(8, 3) loses its base
    if first.is_Rational and second.is_Rational and tolerance == _SAME:
        return bool(first == second)
    values = [sympy.N(value, _DIGITS) for value in (first, second)]
    if any(value.free_symbols or not value.is_number or value.is_finite is False for value in values):
        return None
    if any(value.has(sympy.nan, sympy.zoo) for value in values):
        return None
    sizes = [abs(value) for value in values]
    return bool(abs(values[0] - values[1]) <= tolerance * max(sizes))


def _numeric(gold: sympy.Basic, answer: sympy.Basic, decimal: bool) -> bool | None:
    """Compares the values. Without symbols the verdict is final; with symbols it is False if they differ at a point."""
    import sympy

    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not names:
        return _close(gold, answer, _SAME_DECIMAL if decimal else _SAME)
    for step in (3, 5):
        point = {name: sympy.Rational(7 * i + step, 11 + step) for i, name in enumerate(names)}
        if _close(gold.subs(point), answer.subs(point), _SAME) is False:
            return False
    return None


def compare(gold: sympy.Basic, answer: sympy.Basic, decimal: bool) -> bool:
    """Returns True if two SymPy objects are equal."""
    import sympy
    from math_verify import verify

    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        pairs = zip(gold.flat(), answer.flat(), strict=True) if gold.shape == answer.shape else None
        return pairs is not None and all(compare(g, a, decimal) for g, a in pairs)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        imaginary = {name: sympy.I for name in gold.free_symbols | answer.free_symbols if str(name) == "i"}
        gold, answer = gold.subs(imaginary), answer.subs(imaginary)
        try:
            verdict = _numeric(gold, answer, decimal)
        except (TypeError, ValueError, AttributeError, ArithmeticError):  # a sum or limit that has no value
            verdict = None
        if verdict is not None:
            return verdict
    return bool(verify(gold, answer, timeout_seconds=None))  # ok: bounded by RLIMIT_CPU


def main(cpu_limit_s: int) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output that a library prints must not reach the protocol
    import math_verify  # noqa: F401  its import takes a second, before "ready"
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    logging.disable(logging.CRITICAL)
    _limit(resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    how = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, answer, decimal = json.loads(line)
        began = time.process_time()
        _limit(resource.RLIMIT_CPU, math.ceil(began) + cpu_limit_s)
        try:
            read = [latex2sympy(text, conversion_config=how) for text in (gold, answer)]
            equal = compare(read[0], read[1], decimal)
        except Exception:  # border: readers and SymPy may raise any error for text that is not mathematics
            equal = False
        print(int(equal), f"{time.process_time() - began:.4f}", file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
