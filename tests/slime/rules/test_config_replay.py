"""Tests routing replay in the configuration: flags that it allows, flags that it changes, and errors with their
reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv, write_model

from slime.rules.parser import parse_args
from vime.backends import parse_config
from vime.vllm.server_flags import engine_settings

MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
ENGINE, OWN = "--use-rollout-routing-replay", "--use-routing-replay"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    flags = good_argv(tmp_path)
    write_model(tmp_path / "model", **MOE)
    return flags


def test_engines_are_asked_for_experts_where_the_trainer_replays_theirs(argv: list[str]) -> None:
    for flags, asked in (([], False), ([OWN], False), ([ENGINE], True), ([OWN, ENGINE], True)):
        assert engine_settings(parse_config([*argv, *flags]))["reports_experts"] is asked


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"{OWN} --use-rollout-logprobs",
            "must not be combined with --use-rollout-logprobs, got both; no pass",
        ),
        (f"{OWN} --loss-type sft_loss", f"{OWN} must be left out with --loss-type sft_loss"),
        (f"{ENGINE} --loss-type sft_loss", f"{ENGINE} must be left out with --loss-type sft_loss"),
        (
            f"{ENGINE} --recompute-granularity selective --recompute-modules moe",
            f"--recompute-modules must not name moe with {ENGINE}, got it; a recomputed layer would not have",
        ),
    ],
)
def test_refused_with_the_reason(argv: list[str], flags: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert message in str(error.value)


def test_one_expert_a_token_tells_of_no_gap(argv: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "model", **MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False})
    parse_args([*argv, OWN])
    with pytest.raises(ValueError, match=f"{ENGINE} must be left out for one expert a token"):
        parse_args([*argv, ENGINE])


def test_goes_with(argv: list[str]) -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    for flags in (f"{ENGINE} --use-rollout-logprobs", f"{ENGINE} {OWN} {full}", f"{OWN} --use-tis"):
        parse_args([*argv, *flags.split()])


def test_a_dense_model_has_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{OWN} must be left out for a dense model, got it"):
        parse_args([*good_argv(tmp_path), OWN])
