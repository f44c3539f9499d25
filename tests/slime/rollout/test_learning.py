"""Tests the figures of a rollout that show whether it can teach anything."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import Config
from slime.rollout.learning import learning_figures, learning_texts
from slime.types import Sample

CUT, DONE = Sample.Status.TRUNCATED, Sample.Status.COMPLETED


def groups(
    *rewards: list[Any], status: Sample.Status = DONE, mask: list[int] | None = None
) -> list[list[Sample]]:
    return [
        [
            Sample(
                group_index=number,
                index=10 * number + i,
                tokens=[1, 2, 3],
                response_length=2,
                reward=reward,
                loss_mask=mask,
                status=status,
            )
            for i, reward in enumerate(group)
        ]
        for number, group in enumerate(rewards)
    ]


def figures(made: list[list[Sample]], **flags: Any) -> dict[str, float]:
    return learning_figures(Config.from_flat({"advantage_estimator": "grpo", **flags}), made)


@pytest.mark.parametrize(
    ("rewards", "flags", "without"),
    [
        ([[0, 0], [1, 1]], {}, 1.0),
        ([[0, 1], [1, 1]], {}, 0.5),
        ([[0.1 + 0.2, 0.3], [1, 1]], {}, 0.5),  # they differ in the last bit, as advantages do
        ([[{"score": 1}, {"score": 1}]], {"reward_key": "score"}, 1.0),
        ([[0, 0], [1, 1]], {"advantage_estimator": "reinforce_plus_plus"}, 0.0),
        ([[1, 1], [1, 1]], {"advantage_estimator": "ppo"}, 1.0),
        ([[0], [1]], {"advantage_estimator": "ppo"}, 0.0),
        ([[0, 0], [1, 1]], {"disable_rewards_normalization": True}, 0.0),
        ([[1]], {"advantage_estimator": "ppo"}, None),  # one sample shows nothing
        ([[0, 0]], {"advantage_estimator": "grpo_turn"}, None),  # rewards of turns count
        ([[0, 0]], {"custom_advantage_function_path": "my.f"}, None),
        ([[0, 0]], {"custom_reward_post_process_path": "my.f"}, None),
        ([[0, 0]], {"use_opd": True}, None),
        ([[0, 0]], {"loss_type": "sft_loss"}, None),
    ],
)
def test_groups_without_spread(
    rewards: list[list[Any]], flags: dict[str, Any], without: float | None
) -> None:
    assert figures(groups(*rewards), **flags).get("without_spread") == without


def test_rewards_truncation_and_dropped_samples() -> None:
    found = figures([*groups([0, 0]), *groups([1, 2], status=CUT)])
    assert found == {
        "untrained": 0.0,
        "truncated": 0.5,
        "reward_mean": 0.75,
        "reward_range": 2.0,
        "without_spread": 0.5,
    }
    removed = groups([0, 1])
    removed[0][0].remove_sample = True
    assert figures(removed)["untrained"] == 0.5
    assert figures(groups([0, 1], mask=[0, 0]))["untrained"] == 1.0
    assert figures(groups([0, 1], mask=[0, 1]))["untrained"] == 0.0
    assert figures([]) == {}


def test_samples_without_rewards_have_the_figure_of_their_masks_alone() -> None:
    assert figures(groups([None, None], mask=[0, 0]), loss_type="sft_loss") == {"untrained": 1.0}


@pytest.mark.parametrize(("labels", "text"), [(["1", "2"], True), (["1", 2], False), ([None, None], False)])
def test_whether_the_labels_are_text(labels: list[Any], text: bool) -> None:
    made = groups([0, 0], [0, 0])
    for group in made:
        for sample, label in zip(group, labels, strict=True):
            sample.label = label
    assert figures(made).get("text_labels") == (1.0 if text else None)


def test_sessions_that_fail_are_counted_with_the_most_frequent_text() -> None:
    made = [*groups([0, 1, 0, 1]), *groups([0, 1, 0, 1])]
    ends = [("done", "")] * 4 + [("request", "a tool must have a name, got None")] * 2
    ends += [("no_request", "an agent must make a request"), ("time", "")]
    for sample, (ended, said) in zip([s for group in made for s in group], ends, strict=True):
        sample.metadata["session"] = {"ended": ended, "said": said}
        if ended in ("request", "no_request"):
            sample.status = Sample.Status.FAILED
    del made[0][0].metadata["session"]  # a sibling of the next sample
    assert figures(made)["failed_sessions"] == pytest.approx(3 / 7)
    said = "request: 29%, no_request: 14%, said: a tool must have a name, got None"
    assert learning_texts(made) == {"session_ends": said}
    assert "failed_sessions" not in figures(groups([0, 1])) and learning_texts(groups([0, 1])) == {}
