"""Rewards for weights that were never trained: they get half of them, so that groups have advantages and gradients."""

from __future__ import annotations

from typing import Any


def odd_share(args: Any, sample: Any, **kwargs: Any) -> float:
    """The share of the response's tokens whose id is odd; a tiny model learns more of it within a few steps."""
    if sample.response_length == 0:  # aborted before its first token
        return 0.0
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 for token in response) / len(response)


def odd_first(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 if the id of the first token is odd, else 0: a group may have one reward, unlike with `odd_share`."""
    return float(sample.response_length > 0 and sample.tokens[-sample.response_length] % 2)


def odd_first_of_half(args: Any, sample: Any, **kwargs: Any) -> float:
    """`odd_first` if `label % 4` is 2 or 3. Other labels always get 0 or always get 1, so their groups have no
    advantage."""
    kind = int(sample.label) % 4
    return odd_first(args, sample) if kind > 1 else float(kind)
