"""Graders get responses of a collapsed or hostile policy. Their time is proportional to the length, and they raise no
error."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from types import SimpleNamespace

import pytest

from slime.rollout import rewards
from slime.rollout.metrics import ends_in_repetition
from slime.rollout.rewards import REWARDS, async_rm, math_equal
from slime.rollout.rewards.gpqa import chosen_letter
from slime.rollout.rewards.gsm8k import final_number
from slime.rollout.rewards.math_equal import same_answer
from slime.rollout.rewards.math_processes import MathChecker
from slime.rollout.rewards.notation import tidy
from slime.rollout.rewards.quantity import quantity
from slime.rollout.rewards.special_tokens import _without_texts
from slime.rollout.rewards.text import without_special_text
from slime.rollout.rewards.unit_tests import extract_program
from slime.types import Sample

LABELS = {"math": "5", "deepscaler": "5", "dapo": "5", "gsm8k": "5", "gpqa": "B", "f1": "the answer"}
WRAPS = {
    "math": [r"\boxed{%s}", r"\boxed{%s", "%s"],
    "deepscaler": [r"</think>\boxed{1%sx}", "%s</think>"],
    "dapo": ["Answer: %s", "%s\nAnswer: 5"],
    "gsm8k": ["#### 5%sx", r"\boxed{%s}", "%s"],
    "gpqa": ["%s", "The answer is %s"],
    "f1": ["%s"],
}
# The entries are separated by spaces: special tokens, LaTeX, brackets and numbers, words.
_PLAIN = r"""
</s> <s> <|x|> <|x <| |> [| |] [/INST] [INST ]~ [e~[ <eos <eos. <eos> eos. <pad></s> ｜ <｜a｜> </think> <think>
<answer> </answer> ###Response
\boxed{ \boxed{1} \boxed \fbox{ \frac{1}{ \frac{ \frac \frac12 \dfrac1 \text{ \text{a} \text{\text{ \mathrm{ {\rm {\over
\over \over{ \left( \left \phantom{ \hspace{ \quad \\ \% \sqrt{ \sqrt( \sqrt(() \sqrt sqrt( \cup \pm \{ \} \{1, \langle
\( \) \[ \] \(1 \$ \log_ \times10^ 1\times10^ \begin{ \degree ^\circ \overline{ \color{ \operatorname{
{ } {} ( ) () [ ] [] < > 1 1, 1,000 ,000 , . 1. 1.1 1/ / \ $ $$ $1 #### ####- # - + -- = x= x^2+ ^ ^{ ^( _ _{ 2^ 52_8 1_
1: 1! ! !1 1e 1e5 0x % * ** ` ``` ~ ; | & ' " ’ ٣ ½ ² ₂ α ﷺ 😀 {,} '000 1'000
a A aA answer answer: Answer: ab option cm^2 base2 or and not is so the it’s eos yes ok
"""
_SPACED = (
    *(
        " ",
        "\n",
        "\t",
        "\r\n",
        "\u00a0",
        "\n\n",
        " \n",
        "\x00",
        "\x00{",
        "\ud83d",
        "A ",
        "A\n",
        "B, ",
        "(A) ",
        "A or ",
    ),
    *(
        "not A ",
        "so B ",
        "is ",
        "so ",
        "the answer is ",
        "answer is A ",
        "A is wrong. ",
        "Answer: 5\n",
        "#### ",
    ),
    *("#### 5\n", "12 ", "1 ", "1 000 ", "* ", "_ ", "5 cm^2 ", "dollars ", "million ", "base 2 ", "1 and "),
    *("```python\n", "```\n", "</s>\n", "\\text{ } "),
)
UNITS = (*_PLAIN.split(), *_SPACED)


def pumped(wrap: str, unit: str, length: int) -> str:
    return wrap.replace("%s", unit * (length // len(unit)))


def cpu_s(call, text: str) -> float:
    began = time.thread_time()
    call(text)
    return time.thread_time() - began


def too_slow(call, wrap: str, unit: str, length: int, limit_s: float) -> str | None:
    """Returns an error text if the time for a text and one of twice its length is not proportional, or not small."""
    for _ in range(3):  # another program may have taken the processor's caches
        short = cpu_s(call, pumped(wrap, unit, length))
        long = cpu_s(call, pumped(wrap, unit, 2 * length))
        if long < limit_s and long < 3 * short + 0.01:
            return None
    return f"{wrap!r} with {unit!r}: {short:.4f} s for {length} characters, {long:.4f} s for twice as many"


@pytest.mark.parametrize("name", LABELS)
def test_time_doubles_with_the_length(name):
    slow = [
        why
        for wrap, unit in itertools.product(WRAPS[name], UNITS)
        if (why := too_slow(lambda text: REWARDS[name](text, LABELS[name], {}), wrap, unit, 1500, 0.25))
    ]
    assert not slow, "\n".join(slow)


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELS)
def test_time_doubles_with_the_length_of_long_responses(name):
    wraps = dict.fromkeys(wrap for each in WRAPS.values() for wrap in each)
    slow = [
        why
        for wrap, unit in itertools.product(wraps, UNITS)
        if (why := too_slow(lambda text: REWARDS[name](text, LABELS[name], {}), wrap, unit, 27_000, 2.0))
    ]
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize(
    "read",
    [
        ends_in_repetition,
        extract_program,
        without_special_text,
        lambda text: _without_texts(text, frozenset(["<s>", "</s>", "<|x|>", "[INST]"])),
    ],
    ids=["repetition", "program", "special text", "special tokens"],
)
def test_other_readers_of_responses(read):
    slow = [why for unit in UNITS if (why := too_slow(read, "%s", unit, 4000, 0.1))]
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize("name", ["math", "deepscaler", "gsm8k", "dapo"])
@pytest.mark.parametrize(
    "body",
    [
        r"\frac{1}{" * 6000,
        r"\frac{1}{" * 6000 + "}" * 6000,
        "(" * 27_000 + ")" * 27_000,
        r"\{" * 13_000 + r"\}" * 13_000,
    ],
    ids=["open fractions", "fractions", "brackets", "sets"],
)
def test_nesting_of_54_000_characters_is_a_wrong_answer(name, body):
    began = time.thread_time()
    reward = REWARDS[name](rf"</think>Answer: \boxed{{{body}}}", "5", {})
    assert (reward["score"] if isinstance(reward, dict) else reward) == (-1.0 if name == "dapo" else 0.0)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    "unit", ["cm^{999999999}", "cm^{-999999999}", "m^{1}^{2}", "km^B^1", "cm^{" + 5000 * "9" + "}"]
)
def test_a_unit_to_a_huge_power_is_no_quantity(unit):
    assert quantity(tidy(rf"5\text{{ {unit}}}")) is None
    assert REWARDS["math"](rf"\boxed{{5\text{{ {unit}}}}}", "5", {}) == 0.0


def test_powers_of_units_still_count():
    assert same_answer(r"25\text{ cm}^2", r"25\text{ cm}^2") and not same_answer(
        r"25\text{ cm}^2", r"25\text{ cm}^3"
    )
    assert quantity(r"9.8 \text{m/s^2}").unit == ("length^1", "time^-2")


def test_random_texts_raise_nothing():
    rng = random.Random(0)
    words = [*UNITS, "5", "B", "x", r"\boxed{", "}", "}", r"\frac{1}{2}", "answer", "####", "<|im_end|>"]
    for _ in range(150):
        text = "".join(rng.choice(words) * rng.choice([1, 1, 1, 2, 40]) for _ in range(rng.randrange(1, 12)))
        for name in ("gsm8k", "gpqa", "f1", "dapo"):
            REWARDS[name](rng.choice(WRAPS[name]).replace("%s", text), LABELS[name], {})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("5</s></s>\n", "5"),
        ("<s> [INST] 5 [/INST] </s>", "5 "),
        ("<pad><pad>5<|im_end|><|endoftext|>", "5"),
        ("5" + "[/INST]" * 3000, "5"),
        ("a < b and [c] > d", "a < b and [c] > d"),
        ("5 <" + "eos" * 100 + ">", "5 <" + "eos" * 100 + ">"),  # longer than any special token
    ],
)
def test_special_text_at_the_ends(text, left):
    assert without_special_text(text).strip() == left.strip()


def test_the_last_letters_decide():
    """The grader reads at most the last 1000 letters, so that it can check each letter closely."""
    assert chosen_letter("The answer is (C). " + "B or " * 400, "ABCD") == "C"
    assert chosen_letter("The answer is (C). " + "a " * 4000, "ABCD") == "C"  # articles do not count
    assert chosen_letter("B or " * 40_000 + "so the answer is (D).", "ABCD") == "D"


def test_number_before_many_units():
    assert final_number("It is 5 " + "cm^2 " * 300) == 5
    assert final_number("####" + " " * 50_000 + "7") == 7


@pytest.fixture
def one_second(monkeypatch):
    """Runs SymPy in one process that ends after a second of CPU time."""
    checker = MathChecker(workers=1, cpu_limit_s=1)
    assert checker.equal("1/2", "0.5") is True  # the process has started
    monkeypatch.setattr(math_equal, "_checker", lambda: checker)
    math_equal._ask.cache_clear()
    yield checker
    math_equal._ask.cache_clear()
    checker.close()


def test_parts_of_an_answer_share_one_limit(one_second, caplog):
    """Each part alone would take the limit, and each answer is compared with each part of the label."""
    gold = r"\{" + ",".join(rf"\sqrt{{{i}}}" for i in range(2, 10)) + r"\}"
    answer = r"\{" + ",".join(rf"9^{{9^{{9^{i}}}}}+x" for i in range(2, 10)) + r"\}"
    began = time.monotonic()
    assert same_answer(answer, gold) is False
    assert "takes more than 1 s of CPU time" in caplog.text and len(caplog.records) == 1
    assert time.monotonic() - began < 20  # without one limit, 64 comparisons would take a second each


def score(name: str, response: str, label: str, **args):
    sample = Sample(index=3, group_index=1, response=response, label=label)
    return async_rm(SimpleNamespace(rm_type=name, custom_rm_path=None, **args), sample)


def test_a_response_beyond_the_deadline_has_no_answer_and_the_run_goes_on(one_second, caplog):
    tower = r"\boxed{9^{9^{9^{9}}}}"
    assert asyncio.run(score("math", tower, r"\sqrt{7}", reward_deadline_s=0.2)) == 0.0
    assert "reward math for sample 3 of group 1 needs more than --reward-deadline-s 0.2" in caplog.text


def test_an_error_of_a_grader_counts_as_no_answer_and_one_of_the_label_does_not(monkeypatch, caplog):
    def fails(response, label, metadata):
        return (
            REWARDS["gsm8k"](response, label, metadata) if not response else fails(response, label, metadata)
        )

    monkeypatch.setitem(rewards.REWARDS, "math", fails)
    assert asyncio.run(score("math", "#### 5", "5")) == 0.0
    assert "reward math counts '#### 5' as no answer, because of RecursionError" in caplog.text
    with pytest.raises(
        ValueError, match=r"reward math failed for sample 3 of group 1: label must hold a number"
    ):
        asyncio.run(score("math", "#### 5", "five"))


def test_the_event_loop_keeps_running_while_pumped_responses_are_graded():
    responses = [unit * (54_000 // len(unit)) for unit in ("</s>", "\n", r"\boxed{", "A ", "$", "so B ")]

    async def scenario() -> float:
        tasks = [
            asyncio.create_task(score(name, response, LABELS[name]))
            for name, response in itertools.product(("gsm8k", "gpqa", "math"), responses)
        ]
        longest, last = 0.0, time.monotonic()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        await asyncio.gather(*tasks)
        return longest

    assert asyncio.run(scenario()) < 2  # no call keeps Python's lock; a loaded machine is slower
