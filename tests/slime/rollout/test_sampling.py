"""Sampling parameters from any source have the right type and range before a request is sent."""

from __future__ import annotations

import numpy as np
import pytest

from slime.rollout.sampling import NAMES, RULES, checked
from vime.sglang.client import PARAMETERS, request_params
from vime.vllm.client import request_fields

GOOD = {
    "temperature": (0, 0.0, 1, 1.5, np.float32(0.5)),
    "top_p": (1, 0.1, np.float64(0.9)),
    "top_k": (-1, 0, 20, np.int64(5)),
    "min_p": (0, 1.0),
    "max_new_tokens": (1, 4096, np.int32(7)),
    "min_new_tokens": (0, 3),
    "stop": ("\n", ["a", "b"], [], ("a",)),
    "stop_token_ids": ([], [0, 5], [np.int64(2)]),
    "skip_special_tokens": (True, np.False_),
    "spaces_between_special_tokens": (False,),
    "no_stop_trim": (True,),
    "ignore_eos": (np.True_,),
    "repetition_penalty": (1, 1.1),
    "presence_penalty": (-2, 2.0),
    "frequency_penalty": (0.5,),
    "logit_bias": ({}, {5: 1.0, "7": -3}),
}
BAD = {
    "temperature": (-0.1, float("nan"), float("inf"), "1", True),
    "top_p": (0, 1.1, "0.9", np.nan),
    "top_k": (-2, 5.0, True),
    "min_p": (-0.1, 2),
    "max_new_tokens": (0, -1, 128.0, np.float64(128), "128", True, [128]),
    "min_new_tokens": (-1, 1.0),
    "stop": ("", ["a", 5], 5, b"a", [""]),
    "stop_token_ids": ([-1], [1.0], 5, "5", [True]),
    "skip_special_tokens": (1, "yes"),
    "spaces_between_special_tokens": (0,),
    "no_stop_trim": ("false",),
    "ignore_eos": (1.0,),
    "repetition_penalty": (0, -1, "1"),
    "presence_penalty": (2.1, "0"),
    "frequency_penalty": (-3,),
    "logit_bias": ([1], {"a": 1}, {5: "1"}, {5: float("nan")}),
}


def test_each_parameter_has_cases_and_a_rule():
    assert GOOD.keys() == BAD.keys() == RULES.keys() == NAMES.keys() >= PARAMETERS


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values]
)
def test_a_good_value_leaves_as_a_plain_one(name, value):
    (found,) = checked({name: value, "stop" if name != "stop" else "top_k": None}).values()
    assert found == value and not isinstance(found, np.generic)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(
        ValueError, match=f"the sampling parameter {name} must be .*; check what the generate function"
    ):
        checked({name: value})


@pytest.mark.parametrize("fields", [lambda params: request_fields(params, 0), request_params])
def test_both_backends_check_before_a_request_leaves(fields):
    with pytest.raises(
        ValueError, match=r"max_new_tokens must be a whole number from 1, got 128\.0 \(float\)"
    ):
        fields({"max_new_tokens": 128.0})
