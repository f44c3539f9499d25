"""Tests --config: layers of YAML files under a command line, errors with file and line, all problems in one report."""

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config.config_file import expand_config
from slime.rules import parse_args


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_is_the_flags_it_holds_and_the_command_line_wins(tmp_path, argv):
    file = write(
        tmp_path / "run.yaml",
        "lr: 3e-6\nrollout_temperature: 0.5\nbalance-data: true\nnormalize-advantages: null\n"
        'offload-train: false\ntrain-env-vars: {A: "1"}\neval-prompt-data: [x, '
        + argv[3]
        + "]\nrlk-fast: off\n",
    )
    config = parse_args(["--config", file, *argv, "--lr", "5e-6"])
    assert (config.megatron.lr, config.rollout.rollout_temperature, config.data.balance_data) == (
        5e-6,
        0.5,
        True,
    )
    assert config.cluster.offload_train is False and config.kernels.rlk_fast == "off"
    assert config.cluster.train_env_vars == {"A": "1"} and config.evaluation.eval_prompt_data == [
        "x",
        argv[3],
    ]
    assert parse_args([*argv, "--config", file]).megatron.lr == 3e-6, "the place of --config does not matter"
    assert parse_args(["--config", file, *argv, "--no-balance-data"]).data.balance_data is False


def test_later_files_win_and_repeated_flags_are_replaced_not_added(tmp_path):
    hook = "custom-generate-function-path"
    first = write(tmp_path / "a.yaml", f"lr: 1\n{hook}: a.b\n")
    second = write(tmp_path / "b.yaml", "lr: 2\nseed: 7\n")
    assert expand_config(["--config", first, "--config", second]) == [
        f"--{hook}",
        "a.b",
        "--lr",
        "2",
        "--seed",
        "7",
    ]
    assert expand_config(["--config", first, second, "--lr", "3"])[-2:] == ["--lr", "3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nrollout-bach-size: 4\n", "run.yaml, line 2: --rollout-bach-size is not a known flag; did you mean"),
        ("lr: fast\n", "run.yaml, line 1: --lr must be of type float, got 'fast'"),
        ("seed: 1\nlr: 1\nseed: 2\n", "run.yaml, line 3: seed must be given once, got it in line 1, too"),
        ("rollout-seed: 1\nrollout_seed: 1\n", "line 2: rollout_seed must be given once, got it in line 1"),
        ("colocate: true\nno-colocate: true\n", "line 2: no-colocate must be given once, got it in line 1"),
        ("[1, 2]\n", "run.yaml must be a mapping of flag: value, got a seq"),
        ("lr: [1\n", "run.yaml must be valid YAML, got"),
        ("train-env-vars: {A: 2024-01-01}\n", "line 1: train-env-vars must be a mapping that JSON can hold"),
        ("lr: 1\nrollout-stop: [[a], b]\n", "line 2: rollout-stop must be a list of words or numbers"),
        ("config: other.yaml\n", "line 1: config must not be in a file"),
    ],
)  # fmt: skip
def test_wrong_files(tmp_path, argv, text, message):
    file = write(tmp_path / "run.yaml", text)
    with pytest.raises(ValueError) as error:
        parse_args(["--config", file, *argv])
    assert message in str(error.value)
    assert "\n" not in str(error.value) or "valid YAML" in str(error.value), "one problem is one line"


def test_a_file_that_is_not_there(argv):
    with pytest.raises(ValueError, match=r"--config must name a YAML file that exists, got nowhere.yaml"):
        parse_args(["--config", "nowhere.yaml", *argv])
    with pytest.raises(ValueError, match=r"--config must name a YAML file, got none"):
        parse_args([*argv, "--config"])


def test_all_problems_are_in_one_report(tmp_path, argv):
    file = write(tmp_path / "run.yaml", "eps-clip: wide\n")
    wrong = [
        "--learning-rte",
        "1",
        "--seed",
        "x",
        "--micro-batch-size",
        "0",
        "--save-interval",
        "5",
        "--rm-type",
        "gsm9k",
    ]
    with pytest.raises(ValueError) as error:
        parse_args(["--config", file, *argv, *wrong])
    lines = str(error.value).splitlines()
    assert lines[0] == "6 problems:"
    assert [line.split(". ", 1)[1].split(" must")[0].split(" is ")[0] for line in lines[1:]] == [
        f"{file}, line 1: --eps-clip",
        "--learning-rte",
        "--seed",
        "--micro-batch-size",
        "--rm-type",
        "--save",
    ]


def test_a_file_that_cannot_be_read_hides_no_other_problem(argv):
    with pytest.raises(ValueError) as error:
        parse_args(["--config", "nowhere.yaml", *argv, "--lrr", "1", "--rollout-top-p", "3"])
    named = [line.split()[1] for line in str(error.value).splitlines()[1:]]
    assert named == ["--config", "--lrr", "--rollout-top-p"], "a value that others take over is reported once"


def test_a_value_may_look_like_a_flag(tmp_path):
    file = write(tmp_path / "run.yaml", "rollout-stop: ['--end']\n")
    assert expand_config(["--config", file]) == ["--rollout-stop=--end"]


def test_what_follows_from_an_earlier_problem_is_left_out(argv):
    at = argv.index("--rollout-batch-size")
    argv[at] = "--rolout-batch-size"
    with pytest.raises(ValueError) as error:
        parse_args(argv)
    assert str(error.value) == "--rolout-batch-size is not a known flag; did you mean --rollout-batch-size?"


def test_everything_that_is_missing_is_named_at_once():
    with pytest.raises(ValueError) as error:
        parse_args(["--colocate", "--device", "cpu", "--n-samples-per-prompt", "8"])
    assert str(error.value).startswith("5 problems:\n  1. --hf-checkpoint must be given")
    for flag in ("--rollout-batch-size", "--prompt-data", "--num-rollout", "--rollout-max-response-len"):
        assert f"{flag} must be given" in str(error.value)
