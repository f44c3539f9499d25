"""Defines the ranges of numeric flags. Every flag with a number uses one; see `slime.config.fields.flag`."""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGEST_INT = 2**31 - 1
"""Largest size or count, because these numbers pass through int32 tensors, JSON and C++."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`.

    Ranges without `interval` have a `high` that only excludes absurd values, so messages state only the bound that was
    exceeded.
    """

    low: float
    high: float
    open_low: bool = False
    """True if `low` itself is excluded."""
    open_high: bool = False
    """True if `high` itself is excluded."""
    off: int | None = None
    """A value outside the range that is allowed."""
    interval: bool = False
    """True if messages state both bounds."""

    def problem(self, value: float) -> str | None:
        """Returns the rule that `value` breaks, as the words after "must", or None."""
        if value == self.off:
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return "be a finite number"
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if above and below:
            return None
        if self.interval:
            left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
            return f"lie in {left}{self.low:g}, {self.high:g}{right}"
        if above:
            return f"be at most {int(self.high)}"
        if self.off is not None:
            return f"be {self.off} (off) or above {self.low:g}"
        return f"be above {self.low:g}" if self.open_low else f"be {self.low:g} or more"


COUNT = Range(0, LARGEST_INT, open_low=True)
COUNT_OR_ZERO = Range(0, LARGEST_INT)
BYTES = Range(0, 2**63 - 1, open_low=True)
TOP_K = Range(0, LARGEST_INT, open_low=True, off=-1)
SEED = Range(0, 2**32 - 1)
"""NumPy's range of seeds. torch and vLLM accept more."""
PORT_OR_ANY = Range(0, 2**16 - 1, interval=True)
SECONDS = Range(0, 1e9, open_low=True)
SECONDS_OR_ZERO = Range(0, 1e9)
FRACTION = Range(0, 1, open_low=True, interval=True)
UNIT = Range(0, 1, interval=True)
DECAY = Range(0, 1, open_high=True, interval=True)
"""Decay of a moving average. With 1, the average would never change."""
RATE = Range(0, 1000)
"""Range of learning rates and weight decay."""
TEMPERATURE = Range(0, 100, open_low=True)
TEMPERATURE_OR_GREEDY = Range(0, 100)
BOUND = Range(0, 1e9)
"""Range of bounds of ratios and norms. Scripts switch a bound off with a large value."""
STEEPNESS = Range(0, 1e6, open_low=True)
SMALL = Range(0, 1, open_low=True)
COEFFICIENT = Range(-1e6, 1e6)
