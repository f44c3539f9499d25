"""A reward of another trainer runs as it is, with the arguments that its trainer passes."""

from __future__ import annotations

import asyncio
import inspect
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.config.foreign_rewards import NOT_SCORED, PARTS, RAW_PROMPT, RewardColumns, adapted
from slime.config.hook_calls import CALLS, check_call
from slime.config.sections.reward import RewardConfig
from slime.rollout.rewards.several import add
from slime.types import Sample

LABEL = "42"
METADATA = {"data_source": "gsm8k", "difficulty": 3}


def sample(**fields: Any) -> Sample:
    made = Sample(
        prompt="<user>6*7", response="It is 42", label=LABEL, tokens=[1, 2, 3, 4, 5], response_length=3
    )
    made.metadata = dict(METADATA)
    vars(made).update(fields)
    return made


def call(function: Any, given: Any, args: Any = None, **keys: Any) -> Any:
    check_call("--custom-rm-path", "m.py:f", function, CALLS["custom_rm_path"], scores=True)
    result = adapted(function, RewardColumns(**keys))(args, given)
    return asyncio.run(result) if inspect.isawaitable(result) else result


def run(function: Any, of: Sample | None = None, **keys: Any) -> Any:
    """Returns the reward of one sample."""
    return call(function, of or sample(), **keys)


# A reward of TRL.
def accuracy(completions, solution, **kwargs):
    assert completions[0].startswith("It is 4") and kwargs["difficulty"] == [3]
    return [float(s in c) for c, s in zip(completions, solution, strict=True)]


def of_kwargs(completions, **kwargs):
    assert kwargs["data_source"] == ["gsm8k"]
    return [float(s in c) for c, s in zip(completions, kwargs["solution"], strict=True)]


async def waits(prompts, completions, solution, **kwargs):
    await asyncio.sleep(0)
    assert prompts == ["<user>6*7"]
    return [float(s in c) for c, s in zip(completions, solution, strict=True)]


def two_columns(completions, solution, difficulty, trainer_state=None):
    assert difficulty == [3] and trainer_state.global_step == 0
    return [float(s in c) for c, s in zip(completions, solution, strict=True)]


def conversation(completions, solution, **kwargs):
    return [float(s in c[0]["content"]) for c, s in zip(completions, solution, strict=True)]


def of_helper(prompts, completions, answer, **kwargs):
    assert prompts[0][-1]["content"] == "<user>6*7"
    return [float(a in text(c)) for c, a in zip(completions, answer, strict=True)]


def text(completion):
    return completion[-1].get("content")


def of_ids(completion_ids, solution, **kwargs):
    assert completion_ids == [[3, 4, 5]]
    return [float(s == LABEL) for s in solution]


def of_input(completions, question, solution, **kwargs):
    assert question == ["<user>6*7"]
    return [float(s in c) for c, s in zip(completions, solution, strict=True)]


# A reward of verl.
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["difficulty"] == 3
    return float(ground_truth in solution_str)


def verl2(solution_str, ground_truth):
    return float(ground_truth in solution_str)


def verl_by_name(solution_str, ground_truth, method="strict", *, extra_info, **kwargs):
    assert method == "strict" and extra_info["difficulty"] == 3
    return float(ground_truth in solution_str)


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert data_sources == ["gsm8k"] and extra_infos[0]["difficulty"] == 3
    return [float(g in s) for s, g in zip(solution_strs, ground_truths, strict=True)]


def easy_r1(reward_input):
    return float(reward_input["ground_truth"] in reward_input["response"])


def easy_r1_batch(reward_inputs):
    return [float(one["ground_truth"] in one["response"]) for one in reward_inputs]


# A reward of OpenRLHF.
def reward_func(queries, prompts, labels, **kwargs):
    assert queries[0].startswith("<user>6*7It is 4")
    return [float(label in query) for query, label in zip(queries, labels, strict=True)]


def reward_record(queries, prompts, labels):
    return {"rewards": [float(label in query) for query, label in zip(queries, labels, strict=True)]}


# Rewards that take texts instead of args and sample.
def two(response, label):
    return float(label in response)


def graded(answer, ground_truth):
    return float(ground_truth in answer)


def prompted(prompt, completion, answer):
    return float(prompt == "<user>6*7" and answer in completion)


def batch(prompts, responses, labels):
    return [float(label in one) for one, label in zip(responses, labels, strict=True)]


def with_args(args, response):
    return float("42" in response)


ALL = [accuracy, of_kwargs, waits, two_columns, conversation, of_input, compute_score, verl2]
ALL += [verl_by_name, verl_batch, easy_r1, easy_r1_batch, reward_func, reward_record, two, graded, batch]
ALL += [prompted]


@pytest.mark.parametrize("function", ALL, ids=lambda one: one.__name__)
@pytest.mark.parametrize("response", ["It is 42", "It is 41"])
def test_each_form_gives_the_reward(function: Any, response: str) -> None:
    keys = {"input_key": "question", "label_key": "solution"}
    assert run(function, sample(response=response), **keys) == float(LABEL in response)


@pytest.mark.parametrize("messages", [False, True])
def test_messages_are_given_to_a_reward_that_reads_them(messages: bool) -> None:
    prompt = [{"role": "user", "content": "<user>6*7"}]
    made = sample(prompt=prompt if messages else "<user>6*7")
    assert run(of_helper, made, label_key="answer") == 1.0
    assert run(accuracy, label_key="solution") == 1.0, "a plain text"
    assert run(of_ids, label_key="solution") == 1.0


def test_extra_info_is_the_column_where_there_is_one() -> None:
    made = sample(metadata={**METADATA, "extra_info": {"difficulty": 3}, "difficulty": 9})
    assert run(compute_score, made) == 1.0


def test_a_label_of_another_name_is_the_missing_column() -> None:
    """With `--label-key answer`, a reward's argument `solution` gets the label, unless a column has this name."""
    for function in (accuracy, two_columns):
        assert run(function, label_key="answer") == 1.0
        assert run(function, sample(metadata={**METADATA, "solution": "41"}), label_key="answer") == 0.0


def test_texts_may_follow_the_flags() -> None:
    """Without the adapter, `def with_args(args, response)` would get the sample as its response."""
    assert run(with_args) == 1.0 and run(with_args, sample(response="41")) == 0.0


def test_a_group_is_one_call_of_a_reward_that_takes_lists() -> None:
    """TRL's own call has all completions of a batch, so a reward may compare them."""
    lengths = []

    def shortest(completions, **kwargs):
        lengths.append(len(completions))
        return [float(len(c) == min(map(len, completions))) for c in completions]

    assert call(shortest, [sample(response="aa"), sample(response="a")]) == [0.0, 1.0] and lengths == [2]
    assert call(verl2, [sample(), sample(response="41")], label_key="answer") == [1.0, 0.0]


def test_the_prompt_of_the_row_decides_whether_completions_are_messages() -> None:
    """TRL passes messages to every reward of a conversational data set, and texts to every other reward."""
    seen = []

    def looks(prompts, completions, **kwargs):
        seen.append((prompts[0], completions[0]))
        return [0.0]

    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    run(looks, sample(metadata={RAW_PROMPT: messages}, prompt="<s>q"))
    run(looks, sample(metadata={RAW_PROMPT: "q"}, prompt="<s>q"))
    assert seen == [(messages, [{"role": "assistant", "content": "It is 42"}]), ("q", "It is 42")]


def test_trl_passes_every_column_its_state_and_what_logs() -> None:
    def takes(completions, answer, trainer_state, log_extra, log_metric, **kwargs):
        assert answer == ["42"] and kwargs.keys() == {"prompts", "completion_ids", "hint", "empty"}
        assert kwargs["empty"] == [None] and trainer_state.global_step == 7
        log_extra("parsed", ["42"])
        log_metric("short", 0.5)
        return [1.0]

    made = sample(metadata={"hint": "h", "empty": None}, rollout_id=7)
    assert run(takes, made, input_key="prompt", label_key="answer") == 1.0
    assert made.metadata["parsed"] == "42" and made.metadata[PARTS] == {"short": 0.5}


def test_none_of_trl_does_not_count() -> None:
    def sometimes(completions, **kwargs):
        return [None if "41" in c else 1.0 for c in completions]

    assert run(sometimes) == 1.0
    assert run(sometimes, sample(response="41")) is NOT_SCORED
    flags, made = RewardConfig(rm_type="a.f,b.g", rm_weights=[2.0, 0.5]), sample()
    assert add(flags, made, {"a.f": NOT_SCORED, "b.g": 1.0}) == 0.5
    assert add(flags, made, {"a.f": NOT_SCORED, "b.g": NOT_SCORED}) is NOT_SCORED
    assert math.isnan(add(flags, made, {"a.f": float("nan"), "b.g": 1.0})), "a fault stays visible"


def test_the_score_of_a_verl_record_is_the_reward_unless_a_key_is_given() -> None:
    def record(solution_str, ground_truth):
        return {"score": 0.5, "acc": True, "pred": "42"}

    made = sample()
    assert call(record, made, SimpleNamespace(reward_key=None)) == 0.5
    assert made.metadata[PARTS] == {"acc": 1.0}
    assert call(record, made, SimpleNamespace(reward_key="acc"))["acc"] is True


@pytest.mark.parametrize("result", [[1.0, 2.0], 1.0, []])
def test_a_list_of_another_length_is_an_error(result: Any) -> None:
    def wrong(completions, **kwargs):
        return result

    with pytest.raises(
        ValueError, match="the reward must return a list of 1 rewards, got .*; return one per"
    ):
        run(wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    def of_numpy(completions, **kwargs):
        return np.ones(len(completions), np.float32)

    assert type(run(of_numpy)) is float


def test_a_parameter_that_is_no_column_is_one_line() -> None:
    def needs(completions, answer, difficultly): ...

    with pytest.raises(
        ValueError, match="parameter difficultly of the reward must be a column of the data, got"
    ):
        run(needs, label_key="answer")


def test_names_that_mean_nothing_here_are_taken() -> None:
    def plain(a, b): ...
    def own(args, samples, completions=None): ...
    def third(args, sample, label=None): ...
    def options(options, one, response=None): ...

    for function in (plain, own, third, options):
        check_call("--custom-rm-path", "m", function, CALLS["custom_rm_path"], scores=True)
        assert adapted(function, RewardColumns()) is function
    check_call("--custom-rollout-log-function-path", "m", two, CALLS["custom_rm_path"])


def test_a_class_is_an_error_of_its_own() -> None:
    class Reward:
        def __init__(self, args, sample): ...
        def __call__(self, args, sample): ...

    with pytest.raises(ValueError, match="--x must name a function, got the class m.Reward; name a function"):
        check_call("--x", "m.Reward", Reward, CALLS["custom_rm_path"], scores=True)
    check_call("--x", "m.Reward", Reward(None, None), CALLS["custom_rm_path"], scores=True)
    check_call(
        "--data-source-path",
        "m.S",
        type("S", (), {"__init__": lambda self, args: None}),
        CALLS["data_source_path"],
    )
