"""Rewards for untrained weights: their mean is near one half, so groups have advantages and gradients."""

from __future__ import annotations

from typing import Any


def odd_share(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns the share of the response's tokens whose id is odd. A tiny model raises it within a few steps."""
    if sample.response_length == 0:  # aborted before its first token
        return 0.0
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 for token in response) / len(response)


def odd_first(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns 1 if the first token has an odd id, else 0. Unlike with `odd_share`, a group may have equal rewards."""
    return float(sample.response_length > 0 and sample.tokens[-sample.response_length] % 2)


def odd_first_of_half(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns `odd_first` if `label % 4` is 2 or 3. For remainder 0 the reward is always 0, and for remainder 1 always
    1, so these groups have no advantage."""
    kind = int(sample.label) % 4
    return odd_first(args, sample) if kind > 1 else float(kind)
