"""Tests rule-based rewards, their choice by --rm-type, and the errors that name a sample."""

from __future__ import annotations

import asyncio
import json
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.rollout.rewards import REWARD_NAMES, REWARDS, async_rm, batched_async_rm
from slime.rollout.rewards.dapo import compute_score, normalize_final_answer
from slime.rollout.rewards.f1 import f1_score, normalize_answer
from slime.rollout.rewards.gpqa import chosen_letter, compute_gpqa_reward
from slime.rollout.rewards.gsm8k import final_number
from slime.rollout.rewards.notation import tidy
from slime.rollout.rewards.quantity import decimal_text, quantity
from slime.rollout.rewards.text import expected_answer, extract_answer
from slime.types import Sample

GSM8K = Path(__file__).resolve().parents[5] / "shared" / "data" / "gsm8k" / "test.jsonl"
GSM8K_LIKE = [
    {"question": "4 boxes of 3?", "answer": "4*3=<<4*3=12>>12 pens\n#### 12"},
    {"question": "Half of 2,500?", "answer": "2500/2=<<2500/2=1250>>1250\n#### 1,250"},
    {"question": "3 minus 8?", "answer": "3-8=<<3-8=-5>>-5\n#### -5"},
]


def reward(name: str | None, response: str, label, metadata: dict | None = None, **args):
    sample = Sample(index=7, group_index=2, response=response, label=label, metadata=metadata or {})
    return asyncio.run(async_rm(SimpleNamespace(rm_type=name, **args), sample))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{x}", "x"),
        (r"\boxed 5.", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"first \boxed{1}, then \boxed{2", None),
        (r"\boxed{ }", None),
        ("5", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("$1,000.50", "1000.5"),
        ("-0.0", "0"),
        ("+07", "7"),
        ("−5", "-5"),
        (".5", "0.5"),
        ("18.", "18"),
        (r"50\%", "50"),
        (r"\$3", "3"),
        ("1{,}000", "1000"),
        ("1/2", "0.5"),
        ("1e-05", "0.00001"),
        ("1e16", "1" + "0" * 16),
        ("9" * 40, "9" * 40),
        ("3 4", None),
        ("12:30", None),
        ("2^3", None),
        ("", None),
        (".", None),
    ],
)
def test_number_text(text, number):
    found = quantity(tidy(text))
    assert (None if found is None else decimal_text(found.value)) == number


def test_expected_answer_of_each_label_form():
    assert expected_answer(18) == "18"
    assert expected_answer(r"thus \boxed{18}") == "18"
    assert expected_answer("6*3=<<6*3=18>>18\n#### 18") == "18"
    assert expected_answer(r" \frac12 ") == r"\frac12"
    for bad in (None, "", True, ["18"], r"\boxed{", "solution\n#### "):
        with pytest.raises(ValueError, match=r"label must .* check --label-key"):
            expected_answer(bad)


def test_math_takes_the_last_box():
    assert reward("math", r"\boxed{3} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}") == 1.0
    assert reward("math", r"\boxed{\frac{1}{2}} no, \boxed{3}", r"\frac{1}{2}") == 0.0
    assert reward("math", "the answer is 4", "4") == 0.0
    assert reward("math", r"\boxed{4}", 4) == 1.0
    assert reward("math", r"\boxed{18}", "…\n#### 18") == 1.0


def test_deepscaler_counts_only_after_the_thinking():
    assert reward("deepscaler", r"<think>\boxed{3}</think> it is \boxed{4}", "4") == 1.0
    assert reward("deepscaler", r"<think>\boxed{4}</think> it is \boxed{3}", "4") == 0.0
    assert reward("deepscaler", r"<think>\boxed{4}</think> it is 4", "4") == 0.0
    assert reward("deepscaler", r"###Response \boxed{4}", r"so \boxed{4}") == 1.0
    assert reward("deepscaler", r"<think>still thinking, \boxed{4}", "4") == 0.0


def test_dapo_reads_the_last_answer_line():
    assert reward("dapo", "Answer: 3\nno.\nAnswer: $34$", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert reward("dapo", "Answer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert reward("dapo", "it is 34", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert reward("dapo", "Answer: 34" + " " * 300, "34")["acc"] is False  # the answer is not at the end
    assert reward("dapo", "Answer: 34 or 35", "34")["acc"] is False
    assert reward("dapo", "**Answer:** 34.0<|im_end|>", 34)["acc"] is True
    assert reward("dapo", r"Answer: $\dfrac{1}{2}$", r"\frac{1}{2}")["acc"] is True
    assert compute_score(r"so \boxed{34}", "34", strict_box_verify=True)["score"] == 1.0
    assert compute_score("Answer: 34", "34", strict_box_verify=True)["score"] == -1.0


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("$1{,}000.0$ dollars", "1000"),
        (r"x = \boxed{5}", "5"),
        (r"34 \text{ apples}", "34"),
        ("the 12 students.", "12"),
        (r"90^\circ", "90"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\$5", "5"),
        ("a + b", "a+b"),
        ("2*3", "2*3"),
    ],
)
def test_dapo_normalisation(text, normal):
    assert normalize_final_answer(text) == normal


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("so 9 * 2 = 18\n#### 18", "18"),
        ("#### 17\nwait\n#### $18.00", "18"),
        ("#### Step 2: 9 * 2\nThat makes **18**", "18"),
        (r"in 7 days \boxed{18\text{ eggs}}, that is 2 a day", "18"),
        ("46<|im_end|>", "46"),
        ("a profit of $70,000.", "70000"),
        ("grows by 150%", "150"),
        ("no idea", None),
    ],
)
def test_gsm8k_final_number(response, number):
    assert final_number(response) == (None if number is None else Fraction(number))


def test_gsm8k_label_without_a_number():
    with pytest.raises(ValueError, match=r"sample 7 of group 2: label must hold a number, .* got 'many'"):
        reward("gsm8k", "18", "many")


def gsm8k_lines() -> list[dict]:
    if not GSM8K.exists():
        return GSM8K_LIKE
    with GSM8K.open(encoding="utf-8") as lines:
        return [json.loads(next(lines)) for _ in range(200)]


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_gsm8k_lines_score_their_own_answer_and_no_other(name):
    form = {"gsm8k": "#### {}", "math": "\\boxed{{{}}}"}[name]
    for line in gsm8k_lines():
        answer = line["answer"].rpartition("#### ")[2]
        wrong = str(int(answer.replace(",", "")) + 1)
        assert REWARDS[name](form.format(answer), line["answer"], {}) == 1.0
        assert REWARDS[name](form.format(wrong), line["answer"], {}) == 0.0
    assert REWARDS["gsm8k"](line["answer"], line["answer"], {}) == 1.0
    assert REWARDS["gsm8k"](f"The answer is {answer}.", answer, {}) == 1.0


CHOICES = ["a proton", "an electron", "a neutron", "a photon"]


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (C).", "C"),
        ("Answer: **B**", "B"),
        ("<think>The answer is A.</think>Final answer: D", "D"),
        (r"\boxed{\text{(B)}}", "B"),
        ("The answer is A. No: the correct option is C", "C"),
        ("C is the correct choice, not B", "C"),
        ("After some thought:\n\n(D)\n", "D"),
        ("I choose B because A photon has no mass", "B"),
        ("A photon. I am sure.", None),
        ("Answer: Z", None),
    ],
)
def test_gpqa_chosen_letter(response, letter):
    assert chosen_letter(response, list("ABCD")) == letter


def test_gpqa_ways_to_name_the_right_choice():
    said = "The answer is (C)."
    choices = {"choices": CHOICES}
    assert reward("gpqa", said, "C") == 1.0
    assert reward("gpqa", said, "B") == 0.0
    assert reward("gpqa", said, 2, choices) == 1.0
    assert reward("gpqa", said, "A neutron", choices) == 1.0
    assert reward("gpqa", said, None, {**choices, "correct_letter": "c"}) == 1.0
    assert reward("gpqa", said, "x", {"choices": dict(zip("WXYC", CHOICES, strict=True))}) == 0.0
    # Without a letter the text decides, and a response that names every choice gets nothing.
    assert reward("gpqa", "it must be a neutron", "C", choices) == 1.0
    assert reward("gpqa", "a proton, a neutron, a photon", "C", choices) == 0.0
    assert compute_gpqa_reward("it is forty two", "Forty-two") == 1.0
    with pytest.raises(ValueError, match="label must name the right choice"):
        reward("gpqa", said, None)
    with pytest.raises(ValueError, match="one entry per letter, got 4 choices"):
        reward("gpqa", said, "C", {**choices, "valid_letters": ["A", "B"]})


def test_f1():
    assert normalize_answer("The  Cat, a dog!") == "cat dog"
    # 2 common words, 3 in the response and 4 expected: P 2/3, R 2/4, F1 = 2*2/(3+4).
    assert f1_score("red green blue", "green blue white black") == (4 / 7, 2 / 3, 1 / 2)
    assert f1_score("go go go", "go stop") == (2 / 5, 1 / 3, 1 / 2)
    assert f1_score("yes it is", "yes") == (0.0, 0.0, 0.0)
    assert f1_score(None, "yes") == (0.0, 0.0, 0.0)
    assert reward("f1", "Yes.", "yes") == 1.0
    with pytest.raises(ValueError, match="label must hold a word"):
        reward("f1", "x", "the")


def test_random_repeats_and_is_spread():
    def draw(index: int, seed: int = 1) -> float:
        sample = Sample(index=index, response="x")
        return asyncio.run(async_rm(SimpleNamespace(rm_type="random", rollout_seed=seed), sample))

    draws = [draw(index) for index in range(200)]
    assert draws == [draw(index) for index in range(200)]
    assert draws != [draw(index, seed=2) for index in range(200)]
    assert all(0 <= value < 1 for value in draws)
    assert abs(sum(draws) / 200 - 0.5) < 0.07  # 3.4 standard errors of a uniform mean: 0.2887 / sqrt(200)


def test_boxed_prefix_scores_the_box_alone():
    assert reward("f1", r"a long answer \boxed{green} indeed", "green") < 1.0
    assert reward("boxed_f1", r"a long answer \boxed{green} indeed", "green") == 1.0
    assert reward("boxed_math", r"\boxed{4}", "4") == 1.0
    assert reward("boxed_deepscaler", r"\boxed{4}", "4") == 1.0
    assert reward("boxed_dapo", r"\boxed{4} Answer: 5", "4")["acc"] is True
    assert reward("boxed_gsm8k", r"\boxed{4} #### 5", "4") == 1.0
    assert reward("boxed_gpqa", r"B or \boxed{C}", "C") == 1.0
    for name in REWARDS:
        result = reward(f"boxed_{name}", "no box: 4", "4", {"instruction_id_list": ["format:no_whitespace"]})
        assert result == 0.0 or result["score"] == -1.0


def test_metadata_overrides_rm_type():
    assert reward("math", "4", "4", {"rm_type": "gsm8k"}) == 1.0


def test_unknown_type_names_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError) as error:
        reward("maths", "4", "4")
    text = str(error.value)
    assert "sample 7 of group 2: --rm-type must be one of" in text and "did you mean 'math'?" in text
    assert all(name in text for name in REWARD_NAMES)
    with pytest.raises(ValueError, match=re.escape("metadata rm_type must be one of")):
        reward("math", "4", "4", {"rm_type": "ifbanch"})
    with pytest.raises(ValueError, match=r"got None; or name a function with --custom-rm-path"):
        reward(None, "4", "4")


def test_batched_keeps_the_order():
    samples = [Sample(index=i, response=str(i), label="2") for i in range(5)]
    args = SimpleNamespace(rm_type="gsm8k", custom_rm_path=None)
    assert asyncio.run(batched_async_rm(args, samples)) == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_slime_import_paths():
    from slime.rollout.rm_hub import async_rm as one
    from slime.rollout.rm_hub import batched_async_rm as many
    from slime.rollout.rm_hub import grade_answer_verl
    from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
    from slime.rollout.rm_hub.f1 import f1_score as rm_f1
    from slime.rollout.rm_hub.gpqa import compute_gpqa_reward as rm_gpqa
    from slime.rollout.rm_hub.math_dapo_utils import compute_score as rm_dapo
    from slime.rollout.rm_hub.math_utils import extract_answer as rm_extract
    from slime.rollout.rm_hub.math_utils import grade_answer_mathd, grade_answer_sympy

    assert (one, many, rm_f1, rm_gpqa) == (async_rm, batched_async_rm, f1_score, compute_gpqa_reward)
    assert (rm_dapo, rm_extract) == (compute_score, extract_answer)
    assert grade_answer_verl(r"\boxed{0.5}", "1/2") and not grade_answer_verl("0.5", "1/2")
    assert grade_answer_mathd("1,000", "1000") and grade_answer_sympy(r"\sqrt{8}", r"2\sqrt{2}")
    assert get_deepscaler_rule_based_reward(r"</think>\boxed{2}", 2) == 1.0
