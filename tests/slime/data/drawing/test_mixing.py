"""Tests several data sets with weights, the curriculum by pass rates, and a restart that continues both exactly."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from rollout_double import make_args, write_lines

from slime.config.sections.data import DataConfig
from slime.data.drawing.curriculum import PassRates
from slime.data.drawing.mixing import data_sets
from slime.data.source import PromptDataSource, pop_oldest
from slime.rollout.metrics import data_source_metrics
from slime.types import Sample


@pytest.fixture
def files(tmp_path):
    rows = {name: [{"prompt": f"{name}{i}"} for i in range(n)] for name, n in (("math", 4), ("code", 10))}
    rows["code"][3]["metadata"] = {"data_source": "its own"}
    return [f"{name}={write_lines(tmp_path / (name + '.jsonl'), its)}" for name, its in rows.items()]


def source_of(files, **flags) -> PromptDataSource:
    return PromptDataSource(make_args(prompt_data=files, **flags))


def drawn(source, number) -> list[str]:
    return [group[0].prompt for group in source.get_samples(number)]


@pytest.mark.parametrize(
    ("weights", "math_of_each_28"), [(None, 8), (["math=0.75", "code=0.25"], 21), (["1", "3"], 7)]
)
def test_the_share_of_each_data_set_is_its_weight(files, weights, math_of_each_28):
    """Without weights, the share is the number of prompts, so that all data sets end their epochs together."""
    source = source_of(files, prompt_data_weights=weights)
    assert len(source) == 14
    for _ in range(5):
        got = Counter(prompt[:4] for prompt in drawn(source, 28))
        assert abs(got["math"] - math_of_each_28) <= 1 and sum(got.values()) == 28
    epochs = [order.epoch * order.size + order.position for order in source.orders]
    assert epochs == [order.draws for order in source.orders] and sum(epochs) == 140


def test_every_data_set_has_its_own_epochs_in_its_own_order(files):
    source = source_of(files, prompt_data_weights=["math=1", "code=1"], rollout_shuffle=True)
    whole = drawn(source, 40)
    math = [prompt for prompt in whole if prompt.startswith("math")]
    for epoch in range(4):
        assert sorted(math[4 * epoch : 4 * epoch + 4]) == ["math0", "math1", "math2", "math3"]
    alone = PromptDataSource(make_args(prompt_data=files[0].partition("=")[2], rollout_shuffle=True))
    assert drawn(alone, 12) == math[:12]
    places = [prompt[:4] for prompt in whole]
    assert places[:20] != places[20:], "the order of the data sets does not repeat"


def test_a_restart_continues_the_mixture(files, tmp_path):
    flags = {
        "prompt_data_weights": ["math=2", "code=1"],
        "rollout_shuffle": True,
        "save": str(tmp_path / "c"),
        "load": str(tmp_path / "c"),
    }
    source = source_of(files, **flags)
    source.get_samples(11)
    source.save(0)
    expected = drawn(source, 30)
    again = source_of(files, **flags)
    again.load(0)
    assert drawn(again, 30) == expected
    saved = json.loads((tmp_path / "c/rollout/data_state_0.json").read_text())
    assert saved["data_sets"] == [["math", 4, 2.0], ["code", 10, 1.0]] and len(saved["orders"]) == 2
    with pytest.raises(ValueError, match="weight of each data set of --prompt-data must be what"):
        source_of(files, **flags | {"prompt_data_weights": ["math=1", "code=1"]}).load(0)
    with pytest.raises(ValueError, match="the number of prompts in --prompt-data must be what"):
        source_of(files[1], **flags | {"prompt_data_weights": None}).load(0)


def test_the_name_of_a_data_set_wins_over_a_column_and_the_metadata_of_a_row_over_both(tmp_path):
    rows = [
        {"prompt": "a", "data_source": "x"},
        {"prompt": "b", "data_source": "x", "metadata": {"data_source": "y"}},
    ]
    path = write_lines(tmp_path / "d.jsonl", rows)
    for given, names in (f"math={path}", ["math", "y"]), (path, ["x", "y"]):
        groups = source_of(given).get_samples(2)
        assert [group[0].metadata["data_source"] for group in groups] == names


def test_samples_have_the_name_of_their_data_set(files):
    groups = source_of(files).get_samples(14)
    names = Counter(sample.metadata["data_source"] for group in groups for sample in group)
    assert names == {"math": 8, "code": 18, "its own": 2}
    (group,) = source_of(files[0]).get_samples(1)  # a single file may have a name, too
    assert group[0].metadata == {"data_source": "math"}
    (group,) = source_of(files[0].partition("=")[2]).get_samples(1)
    assert group[0].metadata == {}


def test_metrics_of_each_data_set():
    groups = [
        [Sample(metadata={"data_source": name}, reward=reward) for reward in rewards]
        for name, rewards in (("a", [1, 0]), ("b", [1, 1]), ("a", [0, 0]), ("a", [1, 1]))
    ]
    assert data_source_metrics(None, groups) == {
        "raw_reward/a": 0.5,
        "group_share/a": 0.75,
        "raw_reward/b": 1.0,
        "group_share/b": 0.25,
    }


def test_values_of_the_flags(tmp_path):
    def names(*values, weights=None):
        return [(one.name, one.path, one.weight) for one in data_sets(DataConfig(list(values), weights))]

    assert data_sets(DataConfig()) == []
    assert names("x/a.jsonl", "b.parquet@[:5]") == [("a", "x/a.jsonl", None), ("b", "b.parquet@[:5]", None)]
    assert names("m=a.jsonl", "owner/name:main", weights=["name:main=1", "m=3"]) == [
        ("m", "a.jsonl", 3.0),
        ("name:main", "owner/name:main", 1.0),
    ]
    there = tmp_path / "k=v.jsonl"
    there.write_text("")
    assert names(str(there)) == [(None, str(there), None)], "a path with an equals sign stays a path"
    for values, weights, message in (
        (("a.jsonl", "x/a.jsonl"), None, "a name of its own, got a more than once; write NAME=PATH"),
        (("a=1.jsonl", "b=2.jsonl"), ["a=1"], r"one weight for each NAME=PATH .*\(a b\), got a=1"),
        (("a=1.jsonl", "b=2.jsonl"), ["a=1", "c=2"], "got a=1 c=2; write NAME=WEIGHT"),
        (("a=1.jsonl", "b=2.jsonl"), ["a=0", "b=2"], "must be numbers above 0, got a=0"),
        (("a=1.jsonl", "b=2.jsonl"), ["a=much", "b=2"], "must be numbers above 0, got a=much"),
        (("a.jsonl",), ["1"], r"one weight for each NAME=PATH of --prompt-data \(None\), got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            names(*values, weights=weights)


def rewarded(source, number, reward) -> list[str]:
    """Draws groups, and reports two rewards of `reward(prompt)` per group to the source."""
    groups = source.get_samples(number)
    for group in groups:
        for sample, value in zip(group, reward(group[0].prompt), strict=True):
            sample.reward = value
    source.observe(groups)
    source.observe(groups[:2])  # the second report does not count
    return [group[0].prompt for group in groups]


def easy_below_4(prompt):
    return (1, 1) if int(prompt[4:]) < 4 else (0, 1)


def test_prompts_without_an_advantage_are_drawn_less_often(files):
    source = source_of(files[1], curriculum=0.25)
    assert sorted(rewarded(source, 10, easy_below_4)) == sorted(f"code{i}" for i in range(10))
    counts = Counter(rewarded(source, 300, easy_below_4))
    assert source.take_metrics().keys() == {
        f"rollout/curriculum/{name}" for name in ("seen", "passed_over", "equal_rewards", "solved")
    }
    hard, easy = (sum(counts[f"code{i}"] for i in part) / len(part) for part in (range(4, 10), range(4)))
    assert 0.15 < easy / hard < 0.35 and max(counts.values()) - hard <= 1
    metrics = source.take_metrics()
    assert metrics["rollout/curriculum/equal_rewards"] == metrics["rollout/curriculum/solved"] == 0.4
    assert metrics["rollout/curriculum/seen"] == 10 and metrics["rollout/curriculum/passed_over"] == 0


def test_a_prompt_counts_again_as_soon_as_its_rewards_differ(files):
    source = source_of(files[0], curriculum=0.0)
    rewarded(source, 4, lambda prompt: (0, 0))
    assert drawn(source, 1) == ["math0"], "if all prompts would be left out, the next one is drawn"
    assert source.take_metrics()["rollout/curriculum/passed_over"] == 4
    source.pass_rates.rows["equal"] = False
    assert drawn(source, 4) == ["math1", "math2", "math3", "math0"]


def test_a_restart_continues_the_curriculum(files, tmp_path):
    flags = {
        "curriculum": 0.5,
        "rollout_shuffle": True,
        "save": str(tmp_path / "c"),
        "load": str(tmp_path / "c"),
    }
    source = source_of(files, **flags)
    for _ in range(6):
        rewarded(source, 7, easy_below_4)
    source.save(0)
    again = source_of(files, **flags)
    again.load(0)
    assert (again.pass_rates.rows == source.pass_rates.rows).all()
    expected = [rewarded(source, 7, easy_below_4) for _ in range(4)]
    assert [rewarded(again, 7, easy_below_4) for _ in range(4)] == expected
    assert (
        again.take_metrics()["rollout/curriculum/solved"]
        == source.take_metrics()["rollout/curriculum/solved"]
    )


def test_what_is_recorded_of_a_prompt():
    rates = PassRates(10_000_000, 0.5, 42)
    first, second = (
        [Sample(group_index=g, metadata={"prompt_index": 7}, reward={"acc": r}) for r in rewards]
        for g, rewards in ((0, (1, 0)), (5, (1, 1)))
    )
    rates.observe([first, second, second, [Sample(group_index=9, reward=1)]], "acc")
    assert rates.rows[7].tolist() == (4, 0.75, 1.0, True, 6)
    assert rates.rows.nbytes == 170_000_000 and np.count_nonzero(rates.rows["tries"]) == 1
    assert len(rates.state_dict()) < 100
    second[0].reward, second[0].group_index = None, 8  # an aborted group
    rates.observe([second], "acc")
    assert rates.rows[7].tolist() == (4, 0.75, 1.0, True, 6)


def test_the_oldest_groups_of_the_buffer_come_first():
    versions = ([], []), ([], []), ([7], [6]), (["9"], ["2", "9"]), ([2], [])
    fresh, by_rollout, newer, older, tie = (
        [Sample(index=2 * i, weight_versions=first), Sample(index=2 * i + 1, weight_versions=second)]
        for i, (first, second) in enumerate(versions)
    )
    by_rollout[0].metadata["start_rollout_id"] = 3
    buffer = [fresh, by_rollout, newer, older, tie]
    assert pop_oldest(None, None, buffer, 2) == [older, tie]
    assert buffer == [newer, by_rollout, fresh]
    source = PromptDataSource(make_args(buffer_sort_by_staleness=True))
    source.add_samples([fresh, newer, older])
    assert source.get_samples(2) == [older, newer] and source.buffer == [fresh]
    source = PromptDataSource(make_args())
    source.add_samples([fresh, newer, older])
    assert source.get_samples(2) == [fresh, newer]
