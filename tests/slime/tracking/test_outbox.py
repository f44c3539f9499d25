"""Tests the metrics that functions of the user log: the numbers, their step, and their receivers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from slime.protocols import Logged
from slime.tracking import outbox


@pytest.fixture(autouse=True)
def begun():
    outbox.begin()


def test_the_step_is_taken_out_of_the_metrics():
    given = {"a": torch.tensor([2]), "b": np.int64(3), "rollout/step": np.int64(5), "train/step": True}
    outbox.log(None, given, step_key="rollout/step")
    outbox.log(None, {"c": float("inf"), "eval/step": 6.0}, "eval/step")
    assert "rollout/step" in given
    assert outbox.take() == [
        Logged({"a": 2.0, "b": 3.0, "train/step": 1.0}, 5, "rollout/step"),
        Logged({"c": float("inf")}, 6, "eval/step"),
    ]
    assert outbox.take() == []


def test_a_block_gets_its_own():
    outbox.log(None, {"a": 1, "train/step": 0}, "train/step")
    with pytest.raises(RuntimeError, match="of the user"), outbox.collected() as found:
        outbox.log(None, {"b": 1, "train/step": 0}, "train/step")
        raise RuntimeError("of the user")
    outbox.log(None, {"c": 1, "train/step": 0}, "train/step")
    assert [one.metrics for one in found] == [{"b": 1.0}]
    assert [one.metrics for one in outbox.take()] == [{"a": 1.0}, {"c": 1.0}]


@pytest.mark.parametrize(
    ("metrics", "key", "said"),
    [
        ({"a": 1, "val/step": 2}, "val/step", "step_key must be one of rollout/step, .* got 'val/step'"),
        (
            {"a": 1},
            "eval/step",
            r"must hold their step as eval/step, got \['a'\]; set metrics\['eval/step'\]",
        ),
        ({"a": [1], "eval/step": 2}, "eval/step", "metric a must be one number, got list"),
        ({"a": "x", "eval/step": 2}, "eval/step", "must be a name with a number, got 'x'"),
        ({"time": 1, "eval/step": 2}, "eval/step", "metric names must not be"),
    ],
)
def test_what_no_tracker_takes_is_an_error_of_the_call(metrics, key, said):
    with pytest.raises(ValueError, match=said):
        outbox.log(None, metrics, step_key=key)
    assert outbox.take() == []


def test_a_process_that_is_not_of_the_run_cannot_log():
    code = (
        "from slime.utils.logging_utils import log\n"
        "try:\n    log(None, {'a': 1, 'train/step': 0}, step_key='train/step')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("log must be called in the process of the rollouts or of a trainer rank")
