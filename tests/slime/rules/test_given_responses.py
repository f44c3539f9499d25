"""Tests losses on given responses: their requirements, and values that decide the requirements of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv, write_model

from slime.algo.losses import PAIRS_ROLLOUT, SFT_ROLLOUT
from slime.config.problems import split_problems
from slime.rules import parse_args
from vime.backends import parse_config

GENERATION = (
    "--rollout-max-response-len must",
    "--rollout-num-gpus must",
    "--rm-type",
    "--n-samples-per-prompt must",
)


@pytest.fixture
def bare(tmp_path: Path) -> list[str]:
    """Returns the flags that every loss needs, without flags of generation."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n')
    model = write_model(tmp_path / "model")
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--num-rollout", "3"),
        *("--rollout-batch-size", "4", "--actor-num-gpus-per-node", "1", "--device", "cpu"),
    ]


def refused(argv: list[str]) -> list[str]:
    with pytest.raises(ValueError) as error:
        parse_config(argv)
    return [str(problem) for problem in split_problems(error.value)]


@pytest.mark.parametrize(
    ("kind", "rule", "path"),
    [
        ("sft_loss", "must give the responses of the data", SFT_ROLLOUT),
        ("dpo", "must make pairs", PAIRS_ROLLOUT),
        ("reward_model", "must make pairs", PAIRS_ROLLOUT),
    ],
)
@pytest.mark.parametrize("more", ["", "--n-samples-per-prompt 2", "--debug-train-only"])
def test_the_default_function_samples_and_is_no_source_of_responses(bare, kind, rule, path, more):
    found = refused([*bare, "--loss-type", kind, *more.split()])
    assert found[0].startswith(
        f"--rollout-function-path {rule} with --loss-type {kind}, got the default, slime."
    )
    assert f"give --rollout-function-path {path} --debug-train-only" in found[0]
    assert not [text for text in found if text.startswith(GENERATION)]
    again = refused([*bare, "--loss-type", kind, "--rollout-function-path", path])
    assert len(again) == 1 and again[0].startswith(
        f"--debug-train-only must be given with --loss-type {kind}"
    )
    parse_config([*bare, "--loss-type", kind, "--rollout-function-path", path, "--debug-train-only"])


def test_other_problems_are_in_the_same_report(bare):
    found = refused([*bare, "--loss-type", "sft_loss", "--kl-loss-coef", "0.1", "--lr-decay-style", "linaer"])
    assert [text.split(" must ")[0] for text in found[:2]] == ["--lr-decay-style", "--rollout-function-path"]
    assert any(text.startswith("--kl-loss-coef must be 0 with --loss-type sft_loss") for text in found)


def test_sft_may_sample_on_purpose(tmp_path):
    argv = [*good_argv(tmp_path), "--loss-type", "sft_loss"]
    notes = parse_args([*argv, "--rm-type", "math"]).notes
    assert any("trains on responses that the model samples" in note for note in notes)
    own = parse_args([*argv, "--rollout-function-path", "json.loads"])
    assert not any("samples" in note for note in own.notes)
    with pytest.raises(ValueError, match="^--rollout-function-path must give the responses"):
        parse_args(argv)


def test_several_samples_of_a_conversation_are_noted(bare):
    sft = [*bare, "--loss-type", "sft_loss", "--rollout-function-path", SFT_ROLLOUT, "--debug-train-only"]
    assert any(
        "trains on each row 2 times" in n for n in parse_args([*sft, "--n-samples-per-prompt", "2"]).notes
    )
    assert not any("each row" in note for note in parse_args(sft).notes)


@pytest.mark.parametrize(
    "wrong", ["--loss-type sft", "--advantage-estimator grpoo", "--opd-type vlm", "--rollout-backend vlmm"]
)
def test_what_another_choice_needs_is_no_problem_of_a_wrong_one(bare, wrong):
    flag, value = wrong.split()
    (only,) = refused([*bare, flag, value])
    assert only.startswith(f"{flag} must be one of ") and f"got {value}" in only


@pytest.mark.parametrize(("steps", "noted"), [(3, True), (4, True), (2, False), (0, False)])
def test_a_policy_that_is_never_trained_is_noted(tmp_path, steps, noted):
    argv = [*good_argv(tmp_path), "--advantage-estimator", "ppo", "--num-critic-only-steps", str(steps)]
    assert any("the policy is never trained" in note for note in parse_args(argv).notes) == noted


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--critic-load none", "--critic-load"),
        ("--critic-load none --critic-save other", "--critic-load"),
        ("--critic-load none --critic-save none", None),
        ("--load none --save other", "--load"),
        ("--load none --save none", None),
        ("--load none", None),
        ("--critic-load .", None),
    ],
)
def test_a_folder_to_load_exists_or_is_made_by_the_run(tmp_path, monkeypatch, flags, refusal):
    monkeypatch.chdir(tmp_path)
    argv = [*good_argv(tmp_path), "--advantage-estimator", "ppo", *flags.split()]
    if refusal is None:
        parse_args(argv)
        return
    with pytest.raises(
        ValueError, match=f"^{refusal} must name a folder that exists, .*, got none, which is no"
    ):
        parse_args(argv)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("", "the trainer, the rollout manager and the engines"),
        ("--debug-train-only", "the trainer and the rollout manager"),
        ("--debug-rollout-only", "the rollout manager and the engines"),
    ],
)
def test_the_line_of_a_start_names_the_parts_of_the_run(tmp_path, flags, parts):
    from vime.driver import _starting

    assert _starting(parse_args([*good_argv(tmp_path), *flags.split()])) == f"starting {parts}"
