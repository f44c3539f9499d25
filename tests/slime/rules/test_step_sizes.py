"""Tests optimizer steps of several sizes: --variable-global-batch-size and --global-batch-size-schedule."""

from __future__ import annotations

import pytest
from config_cases import good_argv

from slime.rules import parse_args
from vime.plan.command import batches

# good_argv: 4 prompts x 8 samples, --global-batch-size 16, two ranks
VARIABLE = "--variable-global-batch-size"
SCHEDULE = "--global-batch-size-schedule"


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        (f"--global-batch-size 12 {VARIABLE}", [12, 12, 8]),
        (f"--global-batch-size 16 {VARIABLE}", [16, 16]),
        (f"--global-batch-size 64 {VARIABLE}", [32]),
        (f"{SCHEDULE} 20,12", [20, 12]),
        (f"{SCHEDULE} 20 4 8", [20, 4, 8]),
        (f"{SCHEDULE} 32 --num-steps-per-rollout 1", [32]),
    ],
)
def test_steps_may_have_several_sizes(tmp_path, flags, sizes):
    config = parse_args([*good_argv(tmp_path), *flags.split()])
    assert config.data.step_sizes == sizes and config.data.num_steps_per_rollout == len(sizes)
    assert config.total_steps == 3 * len(sizes)
    assert [config.data.samples_until(n) for n in range(len(sizes) + 1)] == [
        sum(sizes[:n]) for n in range(len(sizes) + 1)
    ]
    assert config.data.samples_until(len(sizes) + 1) == 32 + sizes[0]
    assert not [note for note in config.notes if "replaces" not in note]
    equal = len(set(sizes)) == 1
    steps = f"{len(sizes)} optimizer step{'s' * (len(sizes) > 1)}"
    wanted = (
        f"--global-batch-size {sizes[0]} x {steps}" if equal else f"{' + '.join(map(str, sizes))} in {steps}"
    )
    assert next(iter(batches(config))).endswith(f"= 32 samples = {wanted} a rollout")


def test_the_number_of_steps_gives_the_size(tmp_path):
    argv = [word for word in good_argv(tmp_path) if word not in ("--global-batch-size", "16")]
    config = parse_args([*argv, *f"--num-steps-per-rollout 3 {VARIABLE} --use-dynamic-batch-size".split(),
                         "--max-tokens-per-gpu", "99"])  # fmt: skip
    assert config.data.step_sizes == [11, 11, 10]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--global-batch-size 12",
            "--rollout-batch-size * --n-samples-per-prompt must equal|--global-batch-size must divide",
        ),
        (
            f"{SCHEDULE} 16,8",
            f"{SCHEDULE} must have the sum --rollout-batch-size * --n-samples-per-prompt, got 16+8 = 24 and 4 * 8 = 32"
            f"; or give --global-batch-size with {VARIABLE}",
        ),
        (f"{SCHEDULE} 16,0,16", f"{SCHEDULE} must be above 0, got 0"),
        (f"{SCHEDULE} 16;16", f"{SCHEDULE} must be of type int, got '16;16'"),
        (
            f"{SCHEDULE} 16,16 --num-steps-per-rollout 3",
            "--num-steps-per-rollout must be the number of steps 16+16, ",
        ),
        (
            f"{SCHEDULE} 31,1",
            "--global-batch-size must be a multiple of data-parallel size * --micro-batch-size in every step of "
            f"{SCHEDULE}, "
            "got 31 and 2 * 1 = 2; or use --use-dynamic-batch-size",
        ),
        (
            f"--global-batch-size 31 {VARIABLE} --use-dynamic-batch-size --max-tokens-per-gpu 99",
            "--global-batch-size must be at least the data-parallel size in every step, got 1 for 2 ranks",
        ),
    ],
)
def test_wrong_sizes_are_named(tmp_path, flags, message):
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), *flags.split()])
    assert any(text in str(error.value) for text in message.split("|"))
    assert "\n" not in str(error.value)


def test_a_file_gives_a_list(tmp_path):
    file = tmp_path / "more.yaml"
    file.write_text("global_batch_size_schedule: [20, 12]\n")
    argv = good_argv(tmp_path)
    assert parse_args([*argv, "--custom-config-path", str(file)]).data.step_sizes == [20, 12]
    file.write_text("global_batch_size_schedule: 20,12\n")
    assert parse_args([*argv, "--config", str(file)]).data.step_sizes == [20, 12]
