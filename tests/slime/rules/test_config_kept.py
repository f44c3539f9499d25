"""Tests --replay-kept-tokens in the configuration: its requirements, and the engines' requests."""

from __future__ import annotations

import pytest
from config_cases import good_argv

from slime.config.sections.off_policy import count_ties
from slime.rules.parser import parse_args
from vime.backends import parse_config
from vime.vllm.server_flags import engine_settings


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("", "--replay-kept-tokens must be left out with --rollout-top-p 1 and --rollout-top-k -1, got 64"),
        ("--rollout-top-k 100", "--replay-kept-tokens must be at least --rollout-top-k, got 64 and 100"),
        ("--rollout-top-p 0.9 --loss-type sft_loss", "must be left out with --loss-type sft_loss, got 64"),
        ("--rollout-top-p 0.9 --replay-kept-tokens -1", "--replay-kept-tokens must be 0 or more, got -1"),
    ],
)
def test_refused_with_the_reason(tmp_path, flags, rule):
    with pytest.raises(ValueError, match=rule):
        parse_args([*good_argv(tmp_path), "--replay-kept-tokens", "64", *flags.split()])


def test_engines_are_asked_and_the_note_is_gone(tmp_path):
    argv = [*good_argv(tmp_path), "--rollout-top-p", "0.9"]
    plain, replayed = (parse_config([*argv, *more]) for more in ([], ["--replay-kept-tokens", "64"]))
    assert [engine_settings(c)["top_tokens"] for c in (plain, replayed)] == [0, 64 + count_ties(64)]
    assert any("--replay-kept-tokens N computes both" in note for note in plain.notes)
    assert not any("--rollout-top-p" in note for note in replayed.notes)
    # The log-probs are over the same ids.
    parse_args([*argv, "--replay-kept-tokens", "64", "--use-rollout-logprobs"])


def test_sglangs_engines_do_not_have_them(tmp_path):
    flags = "--rollout-top-p 0.9 --replay-kept-tokens 64 --rollout-backend sglang"
    with pytest.raises(
        ValueError, match="--replay-kept-tokens must go with --rollout-backend vllm, got sglang"
    ):
        parse_config([*good_argv(tmp_path), *flags.split()])


@pytest.mark.parametrize("cut", ["--rollout-top-p 0.9", "--rollout-top-k 20"])
@pytest.mark.parametrize(
    "flag", ["--use-tis", "--use-rs", "--get-mismatch-metrics", "--use-rollout-logprobs"]
)
def test_what_compares_with_the_engine_needs_the_kept_ids(tmp_path, cut, flag):
    argv = [*good_argv(tmp_path), *cut.split(), flag]
    with pytest.raises(
        ValueError, match=f"{flag} must be used with --rollout-top-p 1 and --rollout-top-k -1"
    ):
        parse_args(argv)
    parse_args([*argv, "--replay-kept-tokens", "64"])


def test_a_served_teacher_has_no_kept_ids(tmp_path):
    argv = [*good_argv(tmp_path), "--rollout-top-p", "0.9", "--replay-kept-tokens", "64", "--use-opd"]
    served = ["--opd-type", "vllm", "--opd-teacher-url", "http://127.0.0.1:1"]
    with pytest.raises(
        ValueError, match="--replay-kept-tokens must be left out with --opd-type vllm, got 64"
    ):
        parse_args([*argv, *served])
