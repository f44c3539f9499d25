"""Built-in rewards read a response without the special tokens of its tokenizer, by their ids; hooks get the whole
response."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rollout_double import make_args, make_state, make_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from slime.rollout.rewards import async_rm, batched_async_rm
from slime.rollout.rewards.special_tokens import answer_text
from slime.types import Sample

SPELLINGS = [
    "</s>",
    "<eos>",
    "[e~[",
    "<｜end▁of▁sentence｜>",
    "~fin~",
    "<end_of_turn>",
    "ENDE",
    "<|im_end|>",
    "答",
    "0",
]


def tokenizer_with(end: str, *others: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": AddedToken(end, normalized=False, special=True)})
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in others])
    return tokenizer


def sample_of(tokenizer: PreTrainedTokenizerFast, text: str, end: str, label: object) -> Sample:
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.convert_tokens_to_ids(end)]
    response = tokenizer.decode(ids, spaces_between_special_tokens=False)
    return Sample(
        index=0, tokens=[1, 2, *ids], response_length=len(ids), response=response, label=label, prompt="q"
    )


def args_of(tokenizer: PreTrainedTokenizerFast, rm_type: str = "math", **more) -> SimpleNamespace:
    args = make_args(rm_type=rm_type, **more)
    make_state(args, tokenizer)
    return args


@pytest.mark.parametrize("end", SPELLINGS)
@pytest.mark.parametrize(
    ("name", "text", "label"),
    [
        ("math", r"so \boxed 5", "5"),
        ("boxed_math", r"so \boxed 5", "5"),
        ("deepscaler", r"</think>\boxed 5", "5"),
        ("dapo", "Answer: 34", "34"),
        ("gsm8k", "it is 7", "7"),
        ("gpqa", "Answer: b", "B"),
        ("f1", "banana", "banana"),
    ],
)
def test_right_answer_before_any_end(end, name, text, label):
    tokenizer = tokenizer_with(end)
    sample = sample_of(tokenizer, text, end, label)
    before = sample.to_dict()
    reward = asyncio.run(async_rm(args_of(tokenizer, name), sample))
    assert (reward["score"] if isinstance(reward, dict) else reward) == 1.0
    assert sample.response.endswith(end) and sample.to_dict() == before
    assert asyncio.run(batched_async_rm(args_of(tokenizer, name), [sample])) == [reward]


def test_ids_decide_and_not_the_text():
    """The same text without the special token's id is plain text, for example a response about </s>."""
    tokenizer = tokenizer_with("~fin~")
    plain = [tokenizer.encode(letter)[0] for letter in "the end is ~fin~"]
    ids = [*plain, tokenizer.eos_token_id]
    sample = Sample(
        tokens=[1, *ids], response_length=len(ids), response=tokenizer.decode(ids), label="the end is ~fin~"
    )
    assert answer_text(sample, tokenizer) == "the end is ~fin~"


def test_special_tokens_inside_are_line_breaks_and_marks_of_thinking_stay():
    tokenizer = tokenizer_with("<|im_end|>", "<think>", "</think>", "<|sep|>")
    text = r"<think>\boxed{3}</think>Answer: 34<|sep|>done \boxed{4}"
    sample = sample_of(tokenizer, text, "<|im_end|>", "34")
    assert answer_text(sample, tokenizer) == text.replace("<|sep|>", "\n")
    assert asyncio.run(async_rm(args_of(tokenizer, "dapo"), sample))["score"] == 1.0
    sample.label = "4"
    assert asyncio.run(async_rm(args_of(tokenizer, "deepscaler"), sample)) == 1.0


def test_text_that_a_hook_has_written():
    tokenizer = tokenizer_with("~fin~")
    sample = sample_of(tokenizer, "Answer: 3", "~fin~", "34")
    sample.response = "Answer: 34~fin~"
    assert asyncio.run(async_rm(args_of(tokenizer, "dapo"), sample))["score"] == 1.0
    assert answer_text(Sample(response="x~fin~~fin~"), tokenizer) == "x"
    assert answer_text(Sample(response=""), tokenizer) == ""


def test_skipped_special_tokens_and_stop_ids():
    tokenizer = tokenizer_with("~fin~")
    sample = sample_of(tokenizer, "f", "~fin~", "f")
    sample.response = "f"
    assert answer_text(sample, tokenizer) == "f"
    ids = tokenizer.encode("5!", add_special_tokens=False)
    sample = Sample(tokens=[1, *ids], response_length=2, response="5!", label="5")
    assert answer_text(sample, tokenizer, [ids[-1]]) == "5"
    assert answer_text(sample, tokenizer) == "5!"


def test_a_custom_reward_sees_the_whole_response(tmp_path, monkeypatch):
    (tmp_path / "seen_rewards.py").write_text(
        "async def score(args, sample):\n    return len(sample.response)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = tokenizer_with("~fin~")
    sample = sample_of(tokenizer, "abc", "~fin~", "x")
    args = args_of(tokenizer, custom_rm_path="seen_rewards.score")
    assert asyncio.run(async_rm(args, sample)) == len("abc~fin~")


def test_plain_text_is_what_other_trainers_decode() -> None:
    """An engine leaves out the marks of a character that ends incomplete, and other trainers do not."""
    from types import SimpleNamespace

    from slime.rollout.rewards.special_tokens import plain_text
    from slime.types import Sample

    texts = {1: "4", 2: "<|end|>", 3: "\ufffd"}

    def decode(ids: list[int], skip_special_tokens: bool, **kwargs: object) -> str:
        return "".join(texts[one] for one in ids if not (skip_special_tokens and one == 2))

    tokenizer = SimpleNamespace(decode=decode)
    for ids, response, expected in (
        ([1, 2], "4<|end|>", "4"),
        ([1, 2], "4", "4"),
        ([1, 3], "4", "4\ufffd"),
        ([1, 2, 1], "4<|end|>4", "44"),
        ([1, 2], "a hook's text", "a hook's text"),
    ):
        sample = Sample(tokens=[9, *ids], response_length=len(ids), response=response)
        assert plain_text(sample, tokenizer) == expected
    assert plain_text(Sample(response="x"), None) == "x"
