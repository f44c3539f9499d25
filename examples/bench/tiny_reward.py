"""The reward of tiny-cpu.yaml: what an untrained model gets half of, and learns within a few steps."""

from __future__ import annotations

from typing import Any


def odd(args: Any, sample: Any, **kwargs: Any) -> float:
    """The share of the response's tokens whose id is odd."""
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 for token in response) / len(response)
