"""This module checks the types and ranges of sampling parameters before a request is sent. A value of a wrong type can
end an engine's input thread, and all requests to the engine then wait for ever."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import TypeGuard

import numpy as np

from slime.types import SamplingParams

Check = Callable[[object], bool]
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "ignore_eos": "ignore_eos",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
"""Maps slime's and SGLang's names of sampling parameters to vLLM's names.

Other names are errors, because a dropped parameter would change the sampling. vLLM's defaults are SGLang's, except for
max_new_tokens.
"""


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not _boolean(value) and math.isfinite(value)


def _boolean(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _whole(least: int) -> Check:
    return lambda value: isinstance(value, Integral) and not _boolean(value) and int(value) >= least


def _make_list_check(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


RULES: dict[str, tuple[str, Check]] = {
    "temperature": ("be a number from 0", lambda v: _number(v) and v >= 0),
    "top_p": ("be a number above 0 and at most 1", lambda v: _number(v) and 0 < v <= 1),
    "top_k": ("be -1, 0 or a whole number from 1", _whole(-1)),
    "min_p": ("be a number from 0 to 1", lambda v: _number(v) and 0 <= v <= 1),
    "max_new_tokens": ("be a whole number from 1", _whole(1)),
    "min_new_tokens": ("be a whole number from 0", _whole(0)),
    "stop": ("be a text or a list of texts", lambda v: _text(v) or _make_list_check(_text)(v)),
    "stop_token_ids": ("be a list of token ids", _make_list_check(_whole(0))),
    "skip_special_tokens": ("be True or False", _boolean),
    "spaces_between_special_tokens": ("be True or False", _boolean),
    "no_stop_trim": ("be True or False", _boolean),
    "ignore_eos": ("be True or False", _boolean),
    "repetition_penalty": ("be a number above 0", lambda v: _number(v) and v > 0),
    "presence_penalty": ("be a number from -2 to 2", lambda v: _number(v) and -2 <= v <= 2),
    "frequency_penalty": ("be a number from -2 to 2", lambda v: _number(v) and -2 <= v <= 2),
    "logit_bias": (
        "be a dict of token ids and numbers",
        lambda v: (
            isinstance(v, Mapping) and all(str(key).isdigit() and _number(bias) for key, bias in v.items())
        ),
    ),
}
"""Maps slime's and SGLang's parameter names to (description of a valid value, check). None means the default."""


def checked(sampling_params: Mapping[str, object]) -> SamplingParams:
    """Returns `sampling_params` without values of None. Whole numbers and booleans become Python's types.

    Raises ValueError for an unknown name, a wrong type or a value out of range.
    """
    if unknown := sampling_params.keys() - RULES.keys():
        raise ValueError(
            f"sampling parameters must be among {sorted(RULES)}, got {sorted(unknown)}; leave others out"
        )
    found = {}
    for name, value in sampling_params.items():
        if value is None:
            continue
        rule, fits = RULES[name]
        if not fits(value):
            raise ValueError(
                f"the sampling parameter {name} must {rule}, got {value!r} ({type(value).__name__}); check what the "
                "generate function or --eval-config sets"
            )
        found[name] = _plain(value)
    return found


def _plain(value: object) -> object:
    """Converts a NumPy number to Python's type, because JSON requests need Python's types."""
    if _boolean(value):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _build_inference_sampling_params(sampling_params: Mapping[str, object]) -> dict[str, object]:
    """Returns the `sampling_params` of vLLM's /inference/v1/generate, with log-probs, from those of a generate
    function. Raises ValueError for a parameter that vLLM does not have."""
    unknown = [name for name in sampling_params if name not in NAMES and name != "seed"]
    if unknown:
        raise ValueError(
            f"sampling_params must be among {', '.join(NAMES)} and seed, got {unknown}; leave it out"
        )
    names = {**NAMES, "seed": "seed"}
    found = {names[name]: value for name, value in sampling_params.items() if value is not None}
    return {name: value for name, value in found.items() if value != []} | {"logprobs": 1}


def _coerce_flat_int_token_ids(ids: object) -> list[int]:
    """Returns token ids as one list, from nested lists, arrays or tensors. Raises ValueError for a text."""
    if ids is None:
        return []
    if isinstance(ids, str):
        raise ValueError(f"ids must be token ids, got the text {ids!r:.40}; tokenize the text first")
    if isinstance(ids, Iterable) and not hasattr(ids, "tolist"):
        return [token for part in ids for token in _coerce_flat_int_token_ids(part)]
    return [int(token) for token in np.asarray(ids).reshape(-1).tolist()]
