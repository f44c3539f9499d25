"""Tests --offload and related flags: accepted values, and errors with a reason."""

import pytest
from config_cases import good_argv

from slime.rules.parser import parse_args


@pytest.fixture
def argv(tmp_path):
    return good_argv(tmp_path)


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def test_inputs_of_layers_need_full_recomputation(argv):
    config = parse_args([*argv, "--cpu-offloading", *FULL.split(), "--cpu-offloading-num-layers", "1"])
    assert config.megatron.cpu_offloading and "cpu_offloading_num_layers" not in config.megatron.overrides
    assert any("--cpu-offloading-num-layers 1: no effect" in note for note in config.notes)
    message = (
        "--recompute-granularity must be full with --cpu-offloading, got none; add --recompute-granularity"
    )
    with pytest.raises(ValueError, match=message):
        parse_args([*argv, "--cpu-offloading"])
    with pytest.raises(
        ValueError, match="--recompute-method must be uniform with --cpu-offloading, got block"
    ):
        parse_args([*argv, "--cpu-offloading", *FULL.replace("uniform", "block").split()])


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
        ("--offload --no-offload-train", "--offload must not be combined with --no-offload-train"),
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


STREAM, FOLDER = "--stream-optimizer-state-to-disk", "--offload-train-disk-dir"


def test_an_optimizer_in_files_computes_on_the_host(argv, tmp_path):
    flags = f"{STREAM} {FOLDER} {tmp_path} --offload-train-disk-chunk-mb 32 --stream-optimizer-state-moment-dtype bf16"
    config = parse_args([*argv, *flags.split()])
    assert config.megatron.optimizer_cpu_offload
    assert config.megatron.offload_train_disk_chunk_mb == 32
    assert not config.notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (STREAM, f"{FOLDER} must be given with {STREAM}, got none; name a folder of a local disk"),
        (f"{FOLDER} x", f"{STREAM} must be given with {FOLDER}, got only x; add it"),
        (
            "--offload-train-disk-chunk-mb 8",
            f"{STREAM} must be given with --offload-train-disk-chunk-mb, got only 8",
        ),
        (
            f"{STREAM} {FOLDER} x --stream-optimizer-state-moment-dtype fp8e4m3",
            "--stream-optimizer-state-moment-dtype must be one of fp32, bf16, got fp8e4m3",
        ),
        (
            f"{STREAM} {FOLDER} x --optimizer muon",
            f"{STREAM} must be left out with --optimizer muon, got it; Muon",
        ),
        (
            f"{STREAM} {FOLDER} x --no-use-distributed-optimizer",
            "--use-distributed-optimizer must be on with --optimizer-cpu-offload",
        ),
    ],
)
def test_wrong_flags_of_an_optimizer_in_files_are_named(argv, flags, message):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
