"""The error for a reward of another trainer prints an expression, and the expression runs as printed."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from slime.config.hook_calls import CALLS, check_call
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


def advised(function: Any, **keys: Any) -> str:
    with pytest.raises(ValueError) as error:
        check_call("--custom-rm-path", "m.py:f", function, CALLS["custom_rm_path"], scores=True, **keys)
    text = str(error.value)
    assert text.startswith("--custom-rm-path must name a function that is called as f(args, sample) -> ")
    return text.partition("; give a function of this project's form that returns ")[2]


def run(function: Any, of: Sample | None = None, **keys: Any) -> Any:
    """Returns the value of the printed expression."""
    names = {"f": function, "sample": of or sample()}
    text = advised(function, **keys)
    if not inspect.iscoroutinefunction(function):
        return eval(text, names)
    exec(f"async def call():\n    return {text}", names)
    return asyncio.run(names["call"]())  # type: ignore[operator]


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
    assert difficulty == [3] and trainer_state is None
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
def test_the_printed_expression_gives_the_reward(function: Any, response: str) -> None:
    keys = {"input_key": "question", "label_key": "solution"}
    assert run(function, sample(response=response), **keys) == float(LABEL in response)


@pytest.mark.parametrize("messages", [False, True])
def test_messages_are_given_to_a_reward_that_reads_them(messages: bool) -> None:
    prompt = [{"role": "user", "content": "<user>6*7"}]
    made = sample(prompt=prompt if messages else "<user>6*7")
    assert run(of_helper, made, label_key="answer") == 1.0
    assert "[[{" not in advised(accuracy, label_key="solution")
    assert run(of_ids, label_key="solution") == 1.0


def test_the_two_expressions_of_the_first_hour() -> None:
    assert advised(accuracy, label_key="solution") == (
        "f(completions=[sample.response], solution=[sample.label], "
        "**{k: [v] for k, v in sample.metadata.items()})[0]"
    )
    assert advised(verl2) == "f(sample.response, sample.label)"


def test_extra_info_is_the_column_where_there_is_one() -> None:
    made = sample(metadata={**METADATA, "extra_info": {"difficulty": 3}, "difficulty": 9})
    assert run(compute_score, made) == 1.0


def test_a_label_of_another_name_is_the_missing_column() -> None:
    """With `--label-key answer`, a reward's argument `solution` gets the label, unless a column has this name."""
    for function in (accuracy, two_columns):
        assert run(function, label_key="answer") == 1.0
        assert run(function, sample(metadata={**METADATA, "solution": "41"}), label_key="answer") == 0.0


@pytest.mark.parametrize("function", [two, graded, prompted, batch, with_args], ids=lambda one: one.__name__)
def test_texts_in_place_of_the_flags_and_the_sample_are_refused(function: Any) -> None:
    """Without this error, `def two(response, label)` would be called with the flags and the sample."""
    assert advised(function).startswith("f(")


def test_names_that_mean_nothing_here_are_taken() -> None:
    def plain(a, b): ...
    def third(args, sample, label=None): ...
    def options(options, one, response=None): ...

    for function in (plain, third, options):
        check_call("--custom-rm-path", "m", function, CALLS["custom_rm_path"], scores=True)
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
