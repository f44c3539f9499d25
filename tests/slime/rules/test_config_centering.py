"""Tests --use-score-centering in the configuration: its requirements, the flags it reads, and the engines' requests."""

from __future__ import annotations

import pytest
from config_cases import good_argv

from slime.algo.estimators import surrogate_for
from slime.algo.needs import columns_read, ids_read
from slime.operators import ONE_PASS, loss_head
from slime.rules.parser import parse_args
from vime.backends import parse_config
from vime.vllm.server_flags import engine_settings


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (
            "--pg-loss-type sapo",
            "--use-score-centering must be used with --pg-loss-type reinforce, got sapo; a clipped ratio",
        ),
        (
            "--score-centering-top-k 0",
            "--score-centering-top-k must be above 0 with --use-score-centering, got 0; the expectation",
        ),
        ("--score-centering-top-k -1", "--score-centering-top-k must be 0 or more, got -1"),
        (
            "--rollout-top-p 0.9",
            "--use-score-centering must be used with --rollout-top-p 1 and --rollout-top-k -1, got 0.9 and -1",
        ),
        ("--use-opsm", "--use-score-centering must not be combined with --use-opsm, got both; the weight"),
        ("--use-rs", "--use-score-centering must not be combined with --use-rs, got both"),
        ("--use-tis --tis-level sequence", "must not be combined with --tis-level sequence, got both"),
        (
            "--use-tis --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function",
            "must not be combined with --custom-tis-function-path, got both; .* --use-tis with --tis-mode is",
        ),
        (
            "--use-opd --opd-type vllm --rm-url http://t:1 --opd-loss-type jsd --opd-top-k 8",
            "--use-score-centering must not be combined with --opd-loss-type jsd, got both",
        ),
        (
            "--loss-type sft_loss",
            "--use-score-centering must be left out with --loss-type sft_loss, got reinf",
        ),
    ],
)
def test_refused_with_the_reason(tmp_path, flags, rule):
    with pytest.raises(ValueError, match=rule):
        parse_args([*good_argv(tmp_path), "--use-score-centering", *flags.split()])


def test_the_loss_stays_in_the_operator_and_reads_the_samplers_ids(tmp_path):
    argv = [*good_argv(tmp_path), "--use-score-centering", "--use-tis", "--tis-mode", "mask"]
    c = parse_args([*argv, "--score-centering-top-k", "32", "--pg-loss-type", "gpg"])
    assert surrogate_for(c.algorithm).name == "reinforce" and loss_head(c)[0] is ONE_PASS
    assert {"rollout_top_ids", "rollout_top_log_probs"} <= columns_read(c)
    assert ids_read(c) == "rollout_top_ids" and ids_read(parse_args(good_argv(tmp_path))) is None
    assert "old_log_probs" not in columns_read(c)


def test_engines_are_asked(tmp_path):
    argv = good_argv(tmp_path)
    plain, centred = (parse_config([*argv, *more]) for more in ([], ["--use-score-centering"]))
    assert [engine_settings(c)["top_tokens"] for c in (plain, centred)] == [0, 128]


def test_sglangs_engines_do_not_have_them(tmp_path):
    with pytest.raises(
        ValueError, match="--use-score-centering must go with --rollout-backend vllm, got sglang"
    ):
        parse_config([*good_argv(tmp_path), "--use-score-centering", "--rollout-backend", "sglang"])
