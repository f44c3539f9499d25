"""Tests several rewards: their flags, their sum, their parts in samples and metrics."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace

import pytest

from slime.config.config_file import read_config_file
from slime.config.fields import get_specs
from slime.config.schema import Config
from slime.config.sections.reward import RewardConfig
from slime.rollout.metrics import rollout_metrics, sample_metrics
from slime.rollout.rewards import async_rm, batched_async_rm
from slime.rollout.rewards.labels import label_check
from slime.rollout.rewards.several import KEY, figures
from slime.rules.validate import _rewards
from slime.types import Sample

RIGHT, WRONG = r"it is \boxed{4}", "it is 5 not 4"


def sample(response: str = RIGHT, **more) -> Sample:
    return Sample(index=0, group_index=0, response=response, label="4", response_length=1, **more)


def scored(one: Sample, **flags) -> float:
    one.reward = asyncio.run(async_rm(SimpleNamespace(**flags), one))
    return one.reward


@pytest.fixture
def rewards_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "async def short(args, sample): return -len(sample.response) / 10\n"
        "def record(args, sample): return {'score': 0.25, 'other': 3}\n"
    )
    return file


def test_weighted_sum_and_its_parts():
    one = sample(WRONG)
    expected = 2 * 1 / (5 + 1)  # one common word, 5 words in the response and 1 in the label
    assert scored(one, rm_type="math,f1", rm_weights=[1.0, 0.5]) == pytest.approx(0.5 * expected)
    assert one.metadata[KEY] == {"math": 0.0, "f1": pytest.approx(expected)}
    one = sample()
    assert scored(one, rm_type="math,gsm8k") == 2.0, "the weight is 1 without --rm-weights"


def test_a_group_is_scored_together_and_siblings_do_not_share_parts():
    shared = {"id": 7}
    samples = [sample(RIGHT, metadata=shared), sample(WRONG, metadata=shared)]
    args = SimpleNamespace(rm_type="math,gsm8k", rm_weights=[1.0, -1.0])
    assert asyncio.run(batched_async_rm(args, samples)) == [0.0, -1.0]
    assert [s.metadata for s in samples] == [
        {"id": 7, KEY: {"math": 1.0, "gsm8k": 1.0}},
        {"id": 7, KEY: {"math": 0.0, "gsm8k": 1.0}},
    ]
    assert shared == {"id": 7}


@pytest.mark.parametrize("own", ["f1,math", ["f1", "math"]])
def test_the_rm_type_of_a_prompt_has_the_weights_of_its_names(own):
    flags = {"rm_type": "math,gsm8k", "rm_weights": [3.0, 5.0]}
    one = sample("4", metadata={"rm_type": own})
    assert scored(one, **flags) == 1.0 and one.metadata[KEY] == {"f1": 1.0, "math": 0.0}
    one = sample(metadata={"rm_type": own})
    assert scored(one, **flags) == pytest.approx(3.0 + one.metadata[KEY]["f1"])
    one = sample(metadata={"rm_type": "math"})
    assert scored(one, **flags) == 1.0 and KEY not in one.metadata, "one reward is as it is"


def test_functions_of_the_user_and_records_are_parts(rewards_file):
    one = sample("4")
    flags = {"reward_key": "score", "rm_weights": [1.0, 2.0, 4.0]}
    total = scored(one, rm_type=f"gsm8k,{rewards_file}:short,{rewards_file}:record", **flags)
    assert total == pytest.approx(1.0 - 2.0 * 0.1 + 4.0 * 0.25)
    assert one.metadata[KEY] == {"gsm8k": 1.0, "short": -0.1, "record": 0.25}
    assert scored(sample("4"), rm_type=f"{rewards_file}:short") == -0.1
    with pytest.raises(
        ValueError, match="--reward-key must name an entry of reward .*:record, got None; choose"
    ):
        scored(sample("4"), rm_type=f"gsm8k,{rewards_file}:record")


@pytest.mark.parametrize(
    "rm_type, message",
    [
        ("math,mth", "--rm-type must be one of .*, got 'mth'; did you mean 'math'"),
        ("math,", "--rm-type must be one of .*, got ''"),
        ("math,math", "--rm-type must name each reward once, got math more than once"),
        ("math,no_module_here.score", "--rm-type must name a module that can be imported"),
    ],
)
def test_wrong_names(rm_type, message):
    with pytest.raises(ValueError, match=message):
        scored(sample(), rm_type=rm_type)
    with pytest.raises(ValueError, match=message):
        _rewards(Config.from_flat({"rm_type": rm_type}))


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"rm_type": "math,f1", "rm_weights": [1.0]}, "--rm-weights must have a weight .*, got 1 for 2"),
        ({"rm_type": "math", "rm_weights": [1.0]}, "--rm-weights .*several rewards .* got 1 for 1"),
        ({"rm_weights": [1.0, 2.0]}, "got 2 for 0"),
        ({"rm_type": "math,remote_rm"}, "--rm-url must be given with --rm-type remote_rm"),
        ({"rm_type": "boxed_dapo,f1"}, "--reward-key must name the entry of reward boxed_dapo"),
    ],
)
def test_wrong_flags_are_errors_before_the_start(flags, message):
    with pytest.raises(ValueError, match=message):
        _rewards(Config.from_flat(flags))


def test_commas_words_and_lists_are_the_same():
    specs = get_specs(RewardConfig)
    for given in (["math,f1"], ["math", "f1"]):
        assert specs["rm_type"].parse(given, "--rm-type") == "math,f1"
    for given in (["1,-0.2"], ["1", "-0.2"]):
        assert specs["rm_weights"].parse(given, "--rm-weights") == [1.0, -0.2]
    with pytest.raises(ValueError, match="--rm-weights must be of type float, got ''"):
        specs["rm_weights"].parse(["1,"], "--rm-weights")
    with pytest.raises(ValueError, match="--rm-type must be followed by one value, got 0"):
        specs["rm_type"].parse([], "--rm-type")


def test_lists_in_a_configuration_file(tmp_path):
    (tmp_path / "c.yaml").write_text("rm-type: [math, f1]\nrm-weights: [1, -0.2]\n")
    specs = get_specs(RewardConfig)
    found = {g.name: specs[g.name].parse(g.values, g.typed) for g in read_config_file(tmp_path / "c.yaml")}
    assert found == {"rm_type": "math,f1", "rm_weights": [1.0, -0.2]}


def test_each_part_is_a_metric():
    groups = []
    for response in (RIGHT, WRONG):
        one = sample(response)
        scored(one, rm_type="math,gsm8k", rm_weights=[1.0, 0.5])
        groups.append([one])
    logged = rollout_metrics(Config.from_flat({"rollout_num_gpus": 1}), groups, 1.0)
    assert logged["rollout/raw_reward"] == 1.0  # (1.5 + 0.5) / 2
    assert (logged["rollout/reward/math"], logged["rollout/reward/gsm8k"]) == (0.5, 1.0)


def test_parts_of_records_and_of_fanned_out_samples_count_trajectories():
    siblings = [sample(reward={"score": x, "acc": True, "pred": "4"}, rollout_id=1) for x in (0.0, 1.0)]
    alone = sample(reward={"score": -1.0, "acc": False, "pred": "x", "speed": math.nan}, rollout_id=2)
    assert figures([*siblings, alone]) == {"reward/acc": 0.5, "reward/score": -0.25}
    plain = sample_metrics(Config.from_flat({}).logging, None, [[sample(reward=1.0)]])
    assert not [name for name in plain if "reward" in name]


def test_labels_must_fit_each_reward():
    check = label_check(Config.from_flat({"rm_type": "math,gsm8k"}), "label")
    check("4", {})
    with pytest.raises(ValueError, match="for --rm-type gsm8k, got 'x'"):
        check("x", {})
    with pytest.raises(ValueError, match="metadata rm_type must be one of .*, got 'mth'"):
        check("4", json.loads('{"rm_type": ["math", "mth"]}'))
