"""Converts values of a record to a form that JSON and torch can save, and numbers of plug-ins to Python's own."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

import numpy as np

T = TypeVar("T")


def as_plain(value: object) -> object:
    """Converts an array, also in a pair, to a record of text that JSON and torch can save. Copies a list, dict or set,
    and returns any other value unchanged."""
    if isinstance(value, tuple) and any(isinstance(x, np.ndarray) for x in value):
        return tuple(map(as_plain, value))
    if isinstance(value, list | dict | set):
        return copy.copy(value)
    if not isinstance(value, np.ndarray):
        return value
    text = base64.b64encode(value.tobytes()).decode()
    return {"dtype": value.dtype.name, "shape": list(value.shape), "base64": text}


def as_array(value: object) -> object:
    """Returns the value from which `as_plain` made `value`."""
    if isinstance(value, tuple | list) and any(isinstance(x, dict) and "base64" in x for x in value):
        return tuple(map(as_array, value))
    if not (isinstance(value, dict) and value.keys() == {"dtype", "shape", "base64"}):
        return value
    flat = np.frombuffer(base64.b64decode(value["base64"]), value["dtype"])
    return flat.copy().reshape(value["shape"])  # torch needs a writable array


def read_numbers(values: object) -> Iterable[float]:
    """Returns a list, array or tensor of numbers as an iterable of Python numbers. The iterable is empty for None."""
    if values is None:
        return ()
    if isinstance(values, np.ndarray) or hasattr(values, "tolist"):
        values = cast("np.ndarray", values).reshape(-1).tolist()
    return cast("Iterable[float]", values)


def extended(values: list[T] | None, before: int, filler: T, added: list[T]) -> list[T]:
    """Returns `values`, which has an entry for each of `before` tokens, with `added` at the end.

    The list grows in place, because plug-ins hold it. None becomes `before` fillers, and so does a list with another
    length.
    """
    if values is None or len(values) != before:
        values = [filler] * before
    return grown(values, added)


def grown(values: list[T], added: list[T]) -> list[T]:
    """Returns `values` with `added` at the end: the list itself, or a new list for a tuple or an array."""
    values = values if isinstance(values, list) else cast("list[T]", list(read_numbers(values)))
    values += added
    return values


def read_experts(
    meta_info: Mapping[str, object], tokens: int, layers: int | None = None, experts: int | None = None
) -> tuple[int, np.ndarray] | None:
    """Returns `before`, the number of tokens before the first row, and the experts [tokens - 1 - before, layers, K]
    that an answer of /generate has with `return_routed_experts`. `tokens` is the number of tokens of the sample with
    the answer.

    `layers` and `experts`, which is K, are for an answer without the `routed_experts_shape` that our engines add.
    Returns None if the answer has no experts, or if their shape is not known: then the plug-in fills the record.
    """
    text = meta_info.get("routed_experts")
    if isinstance(stated_shape := meta_info.get("routed_experts_shape"), list):
        layers, experts = stated_shape[1], stated_shape[2]
    if not isinstance(text, str) or layers is None or experts is None:
        return None
    before = int(cast("int | None", meta_info.get("routed_experts_start_len")) or 0)
    shape = (tokens - 1 - before, layers, experts)
    flat = np.frombuffer(base64.b64decode(text), np.int32)
    if flat.size != math.prod(shape):
        raise ValueError(
            f"routed_experts must have {list(shape)} entries, tokens but the last, layers and experts of a token, got "
            f"{flat.size}; append all tokens of an answer"
        )
    small = not flat.size or flat.max() <= np.iinfo(np.uint8).max
    return before, flat.astype(np.uint8 if small else np.uint16).reshape(shape)
