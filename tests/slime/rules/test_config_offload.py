"""Tests --offload and related flags: accepted values, and errors with a reason."""

import pytest
from config_cases import good_argv

from slime.rules.parser import parse_args


@pytest.fixture
def argv(tmp_path):
    return good_argv(tmp_path)


OFFLOADS = ("offload", "offload_train", "offload_train_parts", "offload_rollout")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (False, None, None, None)),
        ("--offload-train", (False, True, None, None)),
        ("--no-offload-train", (False, False, None, None)),
        ("--offload", (True, True, None, None)),
        ("--offload-rollout", (False, None, None, True)),
        (
            "--offload-train-parts optimizer gradients",
            (False, None, ["optimizer", "gradients"], None),
        ),
        (
            "--no-colocate --rollout-num-gpus 1 --no-offload-train --no-offload-rollout",
            (False, False, None, False),
        ),
    ],
)
def test_who_leaves_the_device(argv, flags, expected):
    c = parse_args([*argv, *flags.split()])
    assert tuple(c.get_value(name) for name in OFFLOADS) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--no-colocate --rollout-num-gpus 1 --offload-train",
            "--offload-train must come with --colocate, got it",
        ),
        (
            "--no-colocate --rollout-num-gpus 1 --offload",
            "--offload must come with --colocate, got it without",
        ),
        (
            "--no-colocate --rollout-num-gpus 1 --offload-rollout",
            "--offload-rollout must come with --colocate",
        ),
        (
            "--no-colocate --rollout-num-gpus 1 --offload-train-parts optimizer",
            "--offload-train-parts must come with",
        ),
        ("--no-offload-rollout", "--no-offload-rollout must be left out with --colocate, got it"),
        ("--offload --no-offload-train", "--offload must not stand beside --no-offload-train"),
        (
            "--no-offload-train --offload-train-parts optimizer",
            "must name parts that may leave .*, got --no-offload",
        ),
        (
            "--offload-train-parts",
            "--offload-train-parts must name parts that may leave the device, got no part",
        ),
        ("--offload-train-parts moments", "must be one of gradients, parameters, optimizer, got moments"),
        ("--offload-train --nccl-ub", "--offload-train must not be combined with --nccl-ub"),
    ],
)
def test_what_cannot_leave_the_device(argv, flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args([*argv, *flags.split()])
