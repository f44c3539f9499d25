"""Beside the operators that move bytes: their PyTorch references, and those references compiled.

Both are the call of our row itself with another implementation below it, so that inputs, arguments and gradients are
the same by construction.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_kernel.benchmarks.streams import Stream
from rl_kernel.mode import using

COMPILED = ("ratio_kl", "grpo_loss", "swiglu", "rotary")
"""Operators whose reference is one function of tensors, which torch.compile takes whole."""


def with_rivals(streams: Sequence[Stream], families: Sequence[str]) -> list[Stream]:
    """The rows, each with those of `families` ("reference", "compile") behind it that can be measured beside it."""
    found = []
    for stream in streams:
        found.append(stream)
        if "reference" in families and stream.repeats:
            found.append(_rival(stream, "reference", _reference(stream)))
        if "compile" in families and stream.operator in COMPILED:
            found.append(_rival(stream, "compile", _compiled(stream)))
    return found


def _rival(stream: Stream, family: str, call: Callable[[], tuple[Tensor, ...]]) -> Stream:
    name = f"{stream.name}: {family}"
    return replace(stream, name=name, operator="rival", call=call, has_target=False, against=stream.name)


def _reference(stream: Stream) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        with using("off"):
            return stream.call()

    return call


def _compiled(stream: Stream) -> Callable[[], tuple[Tensor, ...]]:
    """The reference alone is compiled: what counts calls around it would be compiled anew in every call."""

    def call() -> tuple[Tensor, ...]:
        with using("off"), _in_place_of_reference(stream.operator):
            return stream.call()

    return call


@contextmanager
def _in_place_of_reference(operator: str) -> Iterator[None]:
    module, name = importlib.import_module(f"rl_kernel.ops.{operator}"), f"{operator}_reference"
    plain = getattr(module, name)
    setattr(module, name, _compile(plain))
    try:
        yield
    finally:
        setattr(module, name, plain)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # Static shapes, as those of the linear operators' rival.
    return torch.compile(function, dynamic=False)
