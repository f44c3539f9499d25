"""--n-samples-per-prompt 1 is an error if all advantages would be 0. It gives a note if a hook makes the groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv
from test_config_validate import without

from slime.rules import parse_args


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def one_sample(argv: list[str]) -> list[str]:
    return [
        *without(argv, "--n-samples-per-prompt"),
        "--n-samples-per-prompt",
        "1",
        "--rollout-batch-size",
        "32",
    ]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
def test_one_sample_a_prompt_would_train_on_nothing(argv, estimator):
    one = one_sample(argv)
    one += ["--advantage-estimator", estimator, "--normalize-advantages"]
    with pytest.raises(
        ValueError,
        match=f"--n-samples-per-prompt must be above 1 with --advantage-estimator {estimator}, got 1",
    ):
        parse_args(one)
    for allowed in (
        "--disable-rewards-normalization",
        "--advantage-estimator reinforce_plus_plus",
        "--custom-reward-post-process-path json.loads",
        "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
        "--debug-rollout-only",
    ):
        c = parse_args([*one, *allowed.split()])
        assert c.data.n_samples_per_prompt == 1 and not [n for n in c.notes if "--n-samples-per-prompt" in n]
    ours = "slime.rollout.sglang_rollout.generate_rollout"
    with pytest.raises(ValueError, match="--n-samples-per-prompt must be above 1"):
        parse_args([*one, "--rollout-function-path", ours])


@pytest.mark.parametrize(
    "maker",
    [
        "--custom-generate-function-path json.loads",
        "--rollout-function-path json.loads",
        "--data-source-path json.loads",
        "--load-debug-rollout-data saved/{rollout_id}.pt",
    ],
)
def test_one_sample_a_prompt_is_noted_where_others_make_the_groups(argv, maker):
    c = parse_args([*one_sample(argv), *maker.split()])
    (note,) = [note for note in c.notes if "--n-samples-per-prompt" in note]
    assert note == (
        "--n-samples-per-prompt 1 with --advantage-estimator grpo: a reward counts relative to its group, so all "
        f"advantages are 0 unless {maker} brings several samples to a group"
    )
    several = parse_args([*argv, *maker.split()])
    assert not [note for note in several.notes if "--n-samples-per-prompt" in note]
