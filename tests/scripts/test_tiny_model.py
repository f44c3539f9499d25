"""Tests the tiny model: it loads, its tokenizer round-trips, its data adds up, and a seed fixes every byte."""

from __future__ import annotations

import json
from pathlib import Path

import make_tiny_model
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def make(folder: Path, *flags: str) -> Path:
    make_tiny_model.main([str(folder), *flags])
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "base")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_same_seed_same_bytes(tiny, tmp_path):
    again = make(tmp_path / "again")
    files = sorted(p.relative_to(tiny) for p in tiny.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    assert all((tiny / f).read_bytes() == (again / f).read_bytes() for f in files)
    other = make(tmp_path / "other", "--seed", "1")
    differ = {str(f) for f in files if (tiny / f).read_bytes() != (other / f).read_bytes()}
    assert {"base/model.safetensors", "train.jsonl", "test.parquet", "sft.jsonl"} <= differ
    assert not differ & {"base/config.json", "base/tokenizer.json", "base/tokenizer_config.json"}


def test_callers_random_state_is_untouched(tmp_path):
    before = torch.random.get_rng_state()
    make(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_checkpoint_loads_whole(tiny, tokenizer):
    model, report = AutoModelForCausalLM.from_pretrained(tiny / "base", output_loading_info=True)
    assert not any(report.values())
    assert (model.config.model_type, model.dtype) == ("qwen3", torch.float32)
    assert 1.0e6 < model.num_parameters() < 3.0e6
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size == len(tokenizer) == 262
    assert model.config.eos_token_id == tokenizer.eos_token_id == 258
    assert model.config.pad_token_id == tokenizer.pad_token_id == 256


@pytest.mark.parametrize(
    "text", ["12+34=46", "user says: 7 - 2\n\t", "héllo 日本 \U0001f600", "<|im_end|>x", ""]
)
def test_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template(tokenizer):
    turns = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(prompt)["input_ids"]) == 14
    assert tokenizer.apply_chat_template(turns, tokenize=False) == prompt + "46<|im_end|>\n"
    assert tokenizer.decode(tokenizer("46<|im_end|>")["input_ids"], skip_special_tokens=True) == "46"


def test_prompts(tiny):
    train, test = rows(tiny / "train.jsonl"), rows(tiny / "test.jsonl")
    assert (len(train), len(test)) == (7844, 256)
    prompts = [row["prompt"] for row in train + test]
    assert len(set(prompts)) == 8100
    for row in train + test:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert (
            10 <= int(left) <= 99 and 10 <= int(right) <= 99 and int(left) + int(right) == int(row["label"])
        )
    assert pq.read_table(tiny / "train.parquet").to_pylist() == train
    assert pq.read_table(tiny / "test.parquet").to_pylist() == test


def test_lessons_are_mostly_right_and_keep_out_the_test_prompts(tiny):
    truth = {row["prompt"]: int(row["label"]) for row in rows(tiny / "train.jsonl")}
    errors = []
    for lesson in rows(tiny / "sft.jsonl"):
        question, answer = lesson["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        errors.append(int(answer["content"]) - truth.pop(question["content"]))
    assert not truth
    assert set(errors) == {0, -20, -10, -2, -1, 1, 2, 10, 20}
    assert abs(errors.count(0) / len(errors) - 0.7) < 0.02


def test_slips_can_be_switched_off(tiny, tmp_path):
    clean = make(tmp_path, "--slips", "0")
    truth = {row["prompt"]: row["label"] for row in rows(clean / "train.jsonl")}
    lessons = [lesson["messages"] for lesson in rows(clean / "sft.jsonl")]
    assert all(truth[question["content"]] == answer["content"] for question, answer in lessons)


@pytest.mark.parametrize(("flag", "value"), [("--test", "0"), ("--test", "8100"), ("--slips", "1.5")])
def test_bad_numbers_are_refused(tmp_path, capsys, flag, value):
    with pytest.raises(SystemExit):
        make(tmp_path, flag, value)
    assert f"{flag} must lie in" in capsys.readouterr().err
