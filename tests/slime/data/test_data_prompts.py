"""Tests prompt files: every format, every column, the slice, the chat template, the limit, and each named error."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_double import make_tokenizer, write_lines
from transformers import AutoTokenizer

from slime.data.limits.samples import filter_long_prompt
from slime.data.prompts import ContextLimits, load_prompts, read_file
from slime.data.rows import RowColumns
from slime.data.tokenizer import load_tokenizer, require_template_reads, shared_tokenizer
from slime.types import Sample

ROWS = [{"prompt": f"q{i}", "label": str(i)} for i in range(5)]
COLUMNS = RowColumns(input_key="prompt", label_key="label")


def write(path: Path, rows: list) -> str:
    if path.suffix == ".jsonl":
        return write_lines(path, rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        keys = list(rows[0])
        path.write_text("\n".join([",".join(keys)] + [",".join(row[k] for k in keys) for row in rows]) + "\n")
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    assert list(read_file(write(tmp_path / f"data.{suffix}", ROWS))) == ROWS


@pytest.mark.parametrize(
    ("spec", "want"),
    [("@[0:2]", [0, 1]), ("@[3:]", [3, 4]), ("@[:1]", [0]), ("@[-2:]", [3, 4]), ("@[1:-1]", [1, 2, 3])],
)
def test_slice(tmp_path, spec, want):
    path = write_lines(tmp_path / "data.jsonl", ROWS)
    assert [row["label"] for row in read_file(path + spec)] == [str(i) for i in want]


def test_prompt_label_metadata_and_tools(tmp_path):
    row = {"prompt": "hi", "label": 7, "metadata": {"level": 2}, "tools": '[{"name": "add"}]'}
    (prompt,) = load_prompts(write_lines(tmp_path / "d.jsonl", [row]), COLUMNS)
    assert (prompt.text, prompt.label) == ("hi", 7)
    assert prompt.metadata == {"level": 2, "tools": [{"name": "add"}]}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_dot_leads_into_a_column(tmp_path, suffix):
    """DAPO-Math-17k is published in this layout."""
    row = {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    }
    path = write(tmp_path / f"d.{suffix}", [row])
    (prompt,) = load_prompts(path, RowColumns(input_key="prompt", label_key="reward_model.ground_truth"))
    assert prompt.label == "2"
    for wrong in ("reward_model.truth", "reward_model.ground_truth.x", "rewards.ground_truth"):
        with pytest.raises(ValueError, match=rf"column '{wrong}' is missing, .* set --label-key"):
            load_prompts(path, RowColumns(input_key="prompt", label_key=wrong))
    (prompt,) = load_prompts(
        write(tmp_path / "a.jsonl", [{"a.b": "whole", "a": {"b": "part"}}]), RowColumns("a.b")
    )
    assert prompt.text == "whole"


def test_chat_template_renders_text_and_messages(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "hi"}, {"prompt": messages}])
    columns = RowColumns(input_key="prompt", apply_chat_template=True)
    first, second = load_prompts(path, columns, tokenizer=make_tokenizer())
    assert first.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert second.text == "<|im_start|>system\nbe brief<|im_end|>\n" + first.text


def test_chat_template_kwargs_and_tools_reach_the_template(tmp_path):
    template = "{{ style }}|{{ tools | length }}|{{ messages[0]['content'] }}"
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "hi", "tools": [{"name": "add"}]}])
    columns = RowColumns("prompt", apply_chat_template=True, apply_chat_template_kwargs={"style": "plain"})
    assert load_prompts(path, columns, tokenizer=make_tokenizer(template))[0].text == "plain|1|hi"


def test_an_argument_that_no_template_reads_is_an_error():
    """Names in macros, loops and tests of the template count. Arguments of transformers itself are not template
    arguments."""
    template = (
        "{% macro say(m) %}{{ m.content }}{{ style }}{% endmacro %}{% set own = 1 %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ say(m) }}{% endgeneration %}"
        "{% elif enable_thinking is defined %}{% continue %}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    good = {"style": "plain", "enable_thinking": False, "continue_final_message": True}
    require_template_reads(good, tokenizer, "--apply-chat-template-kwargs")
    require_template_reads({}, make_tokenizer(""), "--apply-chat-template-kwargs")
    with pytest.raises(ValueError) as error:
        require_template_reads(
            {**good, "enable_thinkin": 1, "own": 2}, tokenizer, "--apply-chat-template-kwargs"
        )
    assert str(error.value) == (
        "--apply-chat-template-kwargs must name arguments that the chat template reads, got enable_thinkin, own; it "
        "reads enable_thinking, messages, style"
    )
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ style }}"}
    require_template_reads({"style": "plain"}, tokenizer, "--apply-chat-template-kwargs")


def test_parquet_messages_lose_the_fields_they_do_not_have(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "3", "name": "add"}]
    path = write(tmp_path / "d.parquet", [{"prompt": messages}])
    assert load_prompts(path, RowColumns("prompt"))[0].text == messages


def test_long_prompts_are_left_out_and_reported(tmp_path, caplog):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "x" * n} for n in (3, 4, 5, 9)])
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(path, RowColumns("prompt"), tokenizer=make_tokenizer(), max_prompt_len=4)
    # One token per letter; a prompt at the limit is allowed.
    assert [p.text for p in prompts] == ["xxx", "xxxx"]
    assert "2 of 4 prompts" in caplog.text and "--rollout-max-prompt-len 4" in caplog.text
    with pytest.raises(
        ValueError, match=r"--rollout-max-prompt-len must leave at least one prompt.* has 3 tokens"
    ):
        load_prompts(path, RowColumns("prompt"), tokenizer=make_tokenizer(), max_prompt_len=2)


def test_a_prompt_that_fills_the_context_is_found_in_the_file(tmp_path):
    """The check needs no limit. Otherwise an engine would reject the prompt minutes later."""
    rows = [{"prompt": "x" * n} for n in (3, 9, 8, 7)]
    path = write_lines(tmp_path / "d.jsonl", rows)
    loaded = []

    def tokenizer():
        loaded.append(True)
        return make_tokenizer()

    def load(tokens: int, name: str = path):
        return load_prompts(name, RowColumns("prompt"), context=ContextLimits(tokens, tokenizer))

    with pytest.raises(ValueError) as error:
        load(8)
    assert str(error.value) == (
        "prompts must be shorter than the model's context of 8 tokens (max_position_embeddings), got 2 of 4 that are "
        f"not; the longest has 9 tokens at {path}:2; shorten them, or leave them out with --rollout-max-prompt-len"
    )
    assert len(load(10)) == 4 and len(loaded) == 2
    assert len(load(10_000)) == 4 and len(loaded) == 2, "short texts are not tokenised"
    huge = write_lines(tmp_path / "huge.jsonl", [{"prompt": "a"}, {"prompt": "ab " * 7_000_000}])
    began = time.monotonic()
    with pytest.raises(
        ValueError, match=r"got 1 of 2 that are not; the longest has 21000000 characters at .*:2"
    ):
        load(40_960, huge)
    assert time.monotonic() - began < 10, "not tokenised"


def test_prompts_that_leave_less_than_a_response_are_named(tmp_path, caplog):
    """A warning names prompts whose responses will be cut, because the context leaves them too little room."""
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "x" * n} for n in (3, 7, 9, 6)])

    def load(**more):
        caplog.clear()
        context = ContextLimits(10, make_tokenizer, "--vllm-max-model-len", more.pop("response", 4))
        with caplog.at_level(logging.WARNING):
            return len(load_prompts(path, RowColumns("prompt"), context=context, **more))

    assert load() == 4
    assert caplog.messages == [
        "2 of 4 prompts leave less room than --rollout-max-response-len 4 in the context of 10 tokens "
        f"(--vllm-max-model-len): their responses are cut; the longest prompt has 9 tokens and leaves 1, at {path}:3"
    ]
    assert load(response=1) == 4 and not caplog.messages
    assert load(tokenizer=make_tokenizer(), max_prompt_len=8) == 3
    assert len(caplog.messages) == 2 and "1 of 3 prompts leave less room" in caplog.messages[1]
    assert f"leaves 3, at {path}:2" in caplog.messages[1]
    write_lines(tmp_path / "d.jsonl", [{"prompt": "x" * n} for n in (3, 12)])
    with pytest.raises(
        ValueError, match=r"10 tokens \(--vllm-max-model-len\), got 1 of 2 .* has 12 tokens at .*:2; "
    ):
        load(tokenizer=make_tokenizer(), max_prompt_len=20)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_byte_that_is_not_utf8_is_named(tmp_path, suffix):
    path = tmp_path / f"d.{suffix}"
    rows = {
        "jsonl": b'{"prompt": "a"}\n{"prompt": "\xff"}\n',
        "json": b'[{"prompt": "a"},\n{"prompt": "\xff"}]',
    }
    path.write_bytes(rows.get(suffix, b"prompt\n\xff\n"))
    with pytest.raises(
        ValueError, match=rf"d\.{suffix}:2: line must be UTF-8, got byte 0xff at position \d+; save"
    ):
        load_prompts(str(path), RowColumns("prompt"))


def test_filter_long_prompt_counts_messages_as_rendered():
    tokenizer = make_tokenizer()
    samples = [Sample(prompt="abc"), Sample(prompt=[{"role": "user", "content": "abc"}])]
    # <|im_start|> user \n abc <|im_end|> \n <|im_start|> assistant \n = 1+4+1+3+1+1+1+9+1 tokens
    assert filter_long_prompt(samples, tokenizer, None, 22) == samples
    assert filter_long_prompt(samples, tokenizer, None, 21) == samples[:1]
    assert filter_long_prompt(samples, tokenizer, None, None) == samples


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "label": "1"', r"d\.jsonl:3: line must be JSON"),
        ('["a"]', r"d\.jsonl:3: must be a JSON object, got list"),
        ('{"question": "a", "label": "1"}', r"d\.jsonl:3: column 'prompt' is missing.*set --input-key"),
        ('{"prompt": "", "label": "1"}', r"d\.jsonl:3: column 'prompt' must hold a prompt, got ''"),
        (
            '{"prompt": 5, "label": "1"}',
            r"d\.jsonl:3: column 'prompt' must be a string or a list of messages, got int",
        ),
        ('{"prompt": ["a"], "label": "1"}', r"d\.jsonl:3: every message .* must be an object with a role"),
        ('{"prompt": "a"}', r"d\.jsonl:3: column 'label' is missing.*set --label-key"),
        ('{"prompt": "a", "label": "1", "metadata": "{"}', r"d\.jsonl:3: column 'metadata' must be JSON"),
        (
            '{"prompt": "a", "label": "1", "metadata": [1]}',
            r"d\.jsonl:3: column 'metadata' must be an object",
        ),
        ('{"prompt": "a", "label": "1", "tools": {"a": 1}}', r"d\.jsonl:3: column 'tools' must be a list"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "ok", "label": "1"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path), COLUMNS)


def test_bad_rows_of_the_other_formats_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"d\.parquet: row 2: column 'label' is empty"):
        load_prompts(write(tmp_path / "d.parquet", [*ROWS[:1], {"prompt": "a", "label": None}]), COLUMNS)
    with pytest.raises(ValueError, match=r"d\.json: entry 2: column 'label' is missing"):
        load_prompts(write(tmp_path / "d.json", [*ROWS[:1], {"prompt": "a"}]), COLUMNS)
    (tmp_path / "d.csv").write_text("prompt,label\na,1\nb\n")
    with pytest.raises(ValueError, match=r"d\.csv:3: line must have 2 fields"):
        load_prompts(str(tmp_path / "d.csv"), COLUMNS)
    for rows in ("a,1,x\nb,2,y\n", "a,1,x\n", "a,1,\n", "a,1,x,y\nb,2,x,y\n"):
        (tmp_path / "wide.csv").write_text(f"prompt,label\n{rows}")
        with pytest.raises(ValueError, match=r"wide\.csv:2: line must have 2 fields"):
            load_prompts(str(tmp_path / "wide.csv"), COLUMNS)
    (tmp_path / "bad.json").write_text('[\n{"prompt": "a"},\n{]')
    with pytest.raises(ValueError, match=r"bad\.json:3: file must be JSON"):
        load_prompts(str(tmp_path / "bad.json"), COLUMNS)
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"bad\.parquet: file must be Parquet"):
        load_prompts(str(tmp_path / "bad.parquet"), COLUMNS)


def test_wrong_files_name_the_flag(tmp_path):
    with pytest.raises(ValueError, match=r"--eval-prompt-data must name an existing file, got .*none\.jsonl"):
        load_prompts(str(tmp_path / "none.jsonl"), COLUMNS, flag="--eval-prompt-data")
    with pytest.raises(ValueError, match=r"--prompt-data must be a file of kind .jsonl.*got .*data\.txt"):
        load_prompts(str(tmp_path / "data.txt"), COLUMNS)
    with pytest.raises(ValueError, match="--prompt-data must hold at least one prompt, got none"):
        load_prompts(write_lines(tmp_path / "d.jsonl", ROWS) + "@[5:]", COLUMNS)


def test_a_template_that_cannot_render_names_the_line(tmp_path):
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "hi"}])
    with pytest.raises(
        ValueError, match=r"d\.jsonl:1: the chat template must be able .*roles must alternate"
    ):
        load_prompts(path, RowColumns("prompt", apply_chat_template=True), tokenizer=tokenizer)


def test_load_tokenizer(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("abc") == make_tokenizer().encode("abc")
    with pytest.raises(ValueError, match="--hf-checkpoint must name an existing directory"):
        load_tokenizer(str(tmp_path / "none"))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    assert type(ours) is type(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="--hf-checkpoint must hold a tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_process_loads_a_tokenizer_again_only_if_its_files_have_changed(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    first = shared_tokenizer(str(tmp_path))
    assert shared_tokenizer(str(tmp_path)) is first
    template = "{{ messages[0].content }}!"
    make_tokenizer(template).save_pretrained(tmp_path)
    assert shared_tokenizer(str(tmp_path)).chat_template == template
    with pytest.raises(ValueError, match="--hf-checkpoint must name an existing directory"):
        shared_tokenizer(str(tmp_path / "none"))


def gsm8k_file(tmp_path: Path) -> str:
    """Returns the real test set if the machine has it, otherwise a file in its format."""
    real = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"
    if real.is_file():
        return str(real)
    rows = [
        {"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(40)
    ]
    return write_lines(tmp_path / "test.jsonl", rows)


def test_gsm8k_loads_by_its_own_columns(tmp_path):
    path = gsm8k_file(tmp_path)
    columns = RowColumns(input_key="question", label_key="answer", apply_chat_template=True)
    prompts = load_prompts(path, columns, tokenizer=make_tokenizer(), max_prompt_len=4096)
    rows = list(read_file(path))
    assert len(prompts) == len(rows) >= 40
    for prompt, row in zip(prompts, rows, strict=True):
        assert prompt.text == f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.label == row["answer"] and "#### " in prompt.label
