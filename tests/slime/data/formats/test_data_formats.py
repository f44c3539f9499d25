"""The same rows in jsonl, Parquet and Arrow give the same prompts. Each row that a run cannot use is named."""

from __future__ import annotations

import copy
import csv
import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_double import make_args, make_state, make_tokenizer, write_lines

from slime.data.prompts import ContextLimits, load_prompts
from slime.data.rows import RowColumns
from slime.data.source import SFT_ROLLOUT
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rewards.gpqa import compute_gpqa_reward
from slime.types import Prompt, Sample

COLUMNS = RowColumns("prompt", "label")
CHAT = RowColumns("prompt", "label", apply_chat_template=True)
ALL = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": fields}}}


def call(**arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


NESTED = [
    {"prompt": call(x=1), "label": "1", "tools": [tool("add", x={"type": "string"})]},
    {
        "prompt": call(city="Rome", deep=[{"a": 1}, {"b": [{"c": 2}]}]),
        "label": "2",
        "tools": [tool("look", city={"type": "string"}), tool("sum", list={"items": {"type": "number"}})],
        "metadata": {"choices": {"A": "yes", "B": "no"}, "more": [{"k": 1}, {"l": [{"m": 2}]}]},
    },
    {
        "prompt": [{"role": "user", "content": "hi"}],
        "label": "3",
        "tools": [],
        "metadata": {"choices": {"A": "1", "B": "2", "C": "3", "D": "4"}, "reward": {"style": "rule"}},
    },
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        return write_lines(path, rows)
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return str(path)


def test_nested_rows_are_the_same_in_each_format(tmp_path):
    columns = [set().union(*NESTED)] * len(NESTED)
    rows = [
        {name: row.get(name) for name in sorted(names)} for row, names in zip(NESTED, columns, strict=True)
    ]
    tokenizer = make_tokenizer(ALL)
    want = load_prompts(write_lines(tmp_path / "d.jsonl", NESTED), CHAT, tokenizer=tokenizer)
    assert json.loads(want[1].text.partition("]{")[0] + "]") == NESTED[1]["tools"]
    assert '"arguments": {"x": 1}' in want[0].text and "null" not in want[0].text + want[1].text
    for name in ("d.parquet", "d.arrow"):
        found = load_prompts(write(tmp_path / name, rows), CHAT, tokenizer=tokenizer)
        assert list(found) == list(want)
        plain = load_prompts(str(tmp_path / name), COLUMNS)
        assert [prompt.text for prompt in plain] == [row["prompt"] for row in NESTED]
        assert list(plain[1].metadata["choices"]) == ["A", "B"]  # C and D belong to other rows
        assert compute_gpqa_reward("The answer is C.", "A", copy.deepcopy(plain[2].metadata)) == 0.0


def test_none_in_a_list_stays_and_json_keeps_its_nulls(tmp_path):
    rows = [{"prompt": "a", "metadata": {"v": [1, None, 3]}}]
    for name in ("d.jsonl", "d.parquet"):
        assert (
            load_prompts(write(tmp_path / name, rows), RowColumns("prompt"))[0].metadata
            == rows[0]["metadata"]
        )
    row = {"prompt": "a", "tools": [tool("add", x={"default": None})]}
    (prompt,) = load_prompts(write_lines(tmp_path / "n.jsonl", [row]), RowColumns("prompt"))
    assert prompt.metadata["tools"] == row["tools"]
    text = {"prompt": "a", "tools": json.dumps(row["tools"])}
    (prompt,) = load_prompts(write(tmp_path / "n.parquet", [text]), RowColumns("prompt"))
    assert prompt.metadata["tools"] == row["tools"], "JSON text in Parquet keeps null"


def test_a_tool_may_be_a_name(tmp_path):
    tokenizer = make_tokenizer(ALL)
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "label": "1", "tools": ["calculator"]}]
    (prompt,) = load_prompts(write(tmp_path / "d.jsonl", rows), CHAT, tokenizer=tokenizer)
    assert '"function": {"name": "calculator"}' in prompt.text
    assert prompt.metadata["tools"] == ["calculator"], "a generate function gets the row's own"


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.arrow"])
@pytest.mark.parametrize("columns", [RowColumns("prompt"), RowColumns("prompt", apply_chat_template=True)])
def test_text_parts_are_joined(tmp_path, name, columns):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    path = write(tmp_path / name, [{"prompt": [{"role": "user", "content": parts}]}])
    (prompt,) = load_prompts(path, columns, tokenizer=make_tokenizer())
    rendered = "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == (
        rendered if columns.apply_chat_template else [{"role": "user", "content": "one two"}]
    )


CONTENT = r"d\.jsonl:2: the content of every message of column 'prompt' must be a text"
PART = r"d\.jsonl:2: every part of a message's content in column 'prompt' must be \{\"type\": \"text\""
HALF = r"d\.jsonl:2: line must be JSON, got .*\\ud83d, which is half of a surrogate pair"


@pytest.mark.parametrize("columns", [RowColumns("prompt"), RowColumns("prompt", apply_chat_template=True)])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user", "content": 5}], CONTENT),
        ([{"role": "user", "content": True}], CONTENT),
        ([{"role": "user", "content": {"a": 1}}], CONTENT),
        ([{"role": "user", "content": None}], CONTENT),
        ([{"role": "user"}], CONTENT),
        ([{"role": "assistant", "content": 1.5}], CONTENT),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], PART),
        ([{"role": "user", "content": ["hi"]}], PART),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], PART),
        ("x \ud83d", HALF),
        ([{"role": "user", "content": "x \ud83d"}], HALF),
        ([{"role": "\ud83d", "content": "x"}], HALF),
    ],
)
def test_a_message_that_no_template_can_render_is_named(tmp_path, columns, prompt, message):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "ok"}, {"prompt": prompt}])
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(path, columns, tokenizer=make_tokenizer())
    assert "fix the line" in str(error.value) or "leave out" in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "label": "\\udc00"}', "half of a surrogate pair"),
        ('{"prompt": "a", "label": "1", "metadata": {"\\uD800": 1}}', "half of a surrogate pair"),
        ('{"prompt": "a", "label": "1", "tools": "[\\"\\\\ud800\\"]"}', "column 'tools' must be JSON.*half"),
        ("[" * 100_000, "line must be JSON.*too many brackets"),
        ('{"prompt": "a", "label": ' + "1" * 5000 + "}", "line must be JSON.*4300 digits"),
    ],
)
def test_json_that_is_no_text_is_named(tmp_path, line, message):
    (tmp_path / "d.jsonl").write_text('{"prompt": "\\ud83d\\ude00", "label": "1"}\n' + line + "\n")
    assert load_prompts(str(tmp_path / "d.jsonl") + "@[:1]", COLUMNS)[0].text == "😀"
    with pytest.raises(ValueError, match=rf"(?s)d\.jsonl:2: .*{message}"):
        load_prompts(str(tmp_path / "d.jsonl"), COLUMNS)


def test_columns_and_bytes_that_no_table_holds_are_named(tmp_path):
    views = pa.table({"prompt": ["a"], "u": pa.array([[1]], pa.list_view(pa.int64()))})
    maps = pa.table({"prompt": ["a"], "u": pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))})
    for number, (table, got) in enumerate([(views, "this type, got list_view"), (maps, "a map, got map<")]):
        for kind in ("parquet", "arrow"):
            path = tmp_path / f"{number}.{kind}"
            if kind == "parquet":
                pq.write_table(table, path)
            else:
                with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
            with pytest.raises(ValueError, match=rf"{number}\.{kind}: column 'u' must not hold {got}"):
                load_prompts(str(path), RowColumns("prompt"))
    sizes, half = pa.py_buffer(b"\0\0\0\0\1\0\0\0\4\0\0\0"), pa.py_buffer(b"a\xed\xa0\xbd")
    texts = pa.Array.from_buffers(pa.string(), 2, [None, sizes, half])
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"d\.parquet: row 2: texts must be UTF-8 .*write the file again"):
        load_prompts(str(tmp_path / "d.parquet"), RowColumns("prompt"))


def test_messages_that_are_rendered_later_are_rendered_when_they_are_read(tmp_path):
    """Without --apply-chat-template, the run renders messages when it generates."""
    strict = make_tokenizer("{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}x")
    user = {"role": "user", "content": "hi"}
    path = write_lines(
        tmp_path / "d.jsonl", [{"prompt": "text"}, {"prompt": [user]}, {"prompt": [user, user]}]
    )
    with pytest.raises(
        ValueError, match=r"d\.jsonl:3: the chat template must be able .*one only; fix the line"
    ):
        load_prompts(path, RowColumns("prompt"), context=ContextLimits(None, lambda: strict))
    assert (
        len(load_prompts(path + "@[:2]", RowColumns("prompt"), context=ContextLimits(1000, lambda: strict)))
        == 2
    )
    broken = make_tokenizer("{{ messages[0].content + 1 }}")
    with pytest.raises(ValueError, match=r"d\.jsonl:2: the chat template must .*TypeError"):
        load_prompts(path, RowColumns("prompt"), tokenizer=broken, max_prompt_len=50)


def test_tools_count_towards_the_length(tmp_path):
    path = write_lines(
        tmp_path / "d.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "tools": [{"name": "add"}]}]
    )
    tokenizer = make_tokenizer("{{ tools | length }}{{ 'long' * 9 if tools else '' }}")
    with pytest.raises(ValueError, match="the shortest of 1 prompts in .* has 37 tokens"):
        load_prompts(path, RowColumns("prompt"), tokenizer=tokenizer, max_prompt_len=36)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", r"d\.jsonl:2: column 'prompt' must hold chat messages for SFT, got text"),
        ([{"role": "user", "content": "q"}], r"d\.jsonl:2: messages .* have an assistant turn .*\['user'\]"),
        (
            [{"role": "assistant", "content": "a"}],
            r"d\.jsonl:2: messages .* must begin with a system or user turn",
        ),
    ],
)
def test_a_conversation_that_sft_cannot_train_on_is_named(tmp_path, checkpoint, prompt, message):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": turns}, {"prompt": prompt}])
    args = make_args(prompt_data=path, loss_type="sft_loss", hf_checkpoint=str(checkpoint))
    args.rollout_function_path = SFT_ROLLOUT
    with pytest.raises(ValueError, match=message):
        RolloutDataSourceWithBuffer(args)


def test_only_the_first_bytes_are_read(tmp_path):
    rows = [{"prompt": "x" * 99, "label": "1"}] * 50 + [{"prompt": 5}]
    path = write_lines(tmp_path / "d.jsonl", rows)
    found = load_prompts(path, COLUMNS, most_bytes=1300)
    assert 8 <= len(found) <= 12 and found.unread == 51 - len(found)
    with pytest.raises(ValueError, match=r"d\.jsonl:51"):
        load_prompts(path, COLUMNS, most_bytes=1 << 20)


def bos_tokenizer(*, template_has_bos: bool = True) -> Any:
    from tokenizers import processors

    tokenizer = make_tokenizer(
        "{{ '<s>' if " + str(template_has_bos).lower() + " else '' }}{{ messages[0].content }}"
    )
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", number), ("<|im_end|>", tokenizer.eos_token_id)]
    )
    return tokenizer


def test_raw_text_gets_the_bos_that_transformers_gives(tmp_path):
    tokenizer = bos_tokenizer()
    state = make_state(make_args(), tokenizer=tokenizer)
    bos, letters = tokenizer.bos_token_id, tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer("hi")["input_ids"] == [bos, *letters, tokenizer.eos_token_id]
    assert state.prompt_ids(Sample(prompt="hi")) == [bos, *letters], "no end: the model continues the prompt"
    assert state.prompt_ids(Sample(prompt="<s>hi")) == [bos, *letters], "not twice"
    messages = [{"role": "user", "content": "hi"}]
    assert state.prompt_ids(Sample(prompt=messages)) == [bos, *letters]
    bare = make_state(make_args(), tokenizer=bos_tokenizer(template_has_bos=False))
    assert bare.prompt_ids(Sample(prompt=messages)) == letters, "as the template says"
    assert make_state(make_args()).prompt_ids(Sample(prompt="hi")) == letters, "a tokenizer without BOS"
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "hi"}])
    with pytest.raises(ValueError, match="has 3 tokens"):
        load_prompts(path, RowColumns("prompt"), tokenizer=tokenizer, max_prompt_len=2)


def test_a_rendered_text_gets_no_second_bos(tmp_path):
    tokenizer = bos_tokenizer(template_has_bos=False)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "hi"}])
    letters = tokenizer.encode("hi", add_special_tokens=False)
    for template, want in ((True, letters), (False, [tokenizer.bos_token_id, *letters])):
        args = make_args(
            prompt_data=path, apply_chat_template=template, hf_checkpoint=str(tmp_path / "model")
        )
        state = make_state(args, tokenizer=tokenizer)
        ((sample, _),) = RolloutDataSourceWithBuffer(args).get_samples(1)
        assert state.prompt_ids(sample) == want
    columns = RowColumns("prompt", apply_chat_template=True)
    assert load_prompts(path, columns, tokenizer=tokenizer, max_prompt_len=2)[0] == Prompt("hi")


ALIKE = [
    {"prompt": "a", "label": "1", "level": "hard", "source": "x"},
    {"prompt": "b", "label": "2", "level": "easy", "source": "y"},
]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.parquet", "d.arrow"])
def test_other_columns_reach_the_metadata(tmp_path, name):
    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_text("prompt,label,level,source\na,1,hard,x\nb,2,easy,y\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ALIKE))
    else:
        write(path, ALIKE)
    found = load_prompts(str(path), COLUMNS)
    assert [prompt.metadata for prompt in found] == [
        {"level": "hard", "source": "x"},
        {"level": "easy", "source": "y"},
    ]


def test_the_metadata_column_wins_and_columns_of_flags_stay_out(tmp_path):
    row = {
        "q": "a",
        "answer": {"text": "1", "by": "x"},
        "info": {"level": 1},
        "level": 2,
        "metadata": "m",
        "empty": None,
    }
    columns = RowColumns("q", "answer.text", metadata_key="info")
    (prompt,) = load_prompts(write_lines(tmp_path / "d.jsonl", [row]), columns)
    assert prompt.metadata == {"answer": row["answer"], "level": 1, "metadata": "m"} and prompt.label == "1"
    pair = {"prompt": "a", "good": "b", "bad": "c", "level": 2}
    columns = RowColumns("prompt", chosen_key="good", rejected_key="bad")
    (prompt,) = load_prompts(write_lines(tmp_path / "p.jsonl", [pair]), columns)
    assert set(prompt.metadata) == {"chosen", "rejected", "level"}


def test_values_that_are_no_json(tmp_path):
    row = {
        "prompt": "a", "day": datetime.date(2026, 11, 27), "price": decimal.Decimal("1.50"), "image": b"png",
        "images": [{"bytes": b"png", "path": "a.png"}], "when": [datetime.datetime(2026, 11, 27, 8)],
    }  # fmt: skip
    (prompt,) = load_prompts(write(tmp_path / "d.parquet", [row]), RowColumns("prompt"))
    assert prompt.metadata == {"day": "2026-11-27", "price": "1.50", "when": ["2026-11-27 08:00:00"]}
    json.dumps(prompt.metadata)


def test_names_that_a_run_writes_itself_are_left_out_with_a_warning(tmp_path, caplog):
    """With another --tool-key, the prompt's tools do not come from a column `tools`."""
    row = {"prompt": "a", "tools": [tool("add")], "session": "7", "level": 1}
    path = write_lines(tmp_path / "d.jsonl", [row])
    (prompt,) = load_prompts(path, RowColumns("prompt", tool_key="functions"))
    assert prompt.metadata == {"level": 1}
    assert "columns session, tools are not in sample.metadata" in caplog.text
    caplog.clear()
    (prompt,) = load_prompts(
        write_lines(tmp_path / "e.jsonl", [row | {"session": None}]), RowColumns("prompt")
    )
    assert prompt.metadata == {"level": 1, "tools": [tool("add")]}
    assert not caplog.records


def test_a_cell_of_csv_with_messages_as_json_is_a_conversation_of_sft(tmp_path, checkpoint):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "d.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt"], [json.dumps(turns)]])
    args = make_args(prompt_data=str(path), loss_type="sft_loss", hf_checkpoint=str(checkpoint))
    args.rollout_function_path = SFT_ROLLOUT
    assert RolloutDataSourceWithBuffer(args).prompts[0].text == turns


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (
            [{"prompt": "a"}, {"question": "b"}],
            r":2: .*; fix the line, as other rows have it, or set --input-key",
        ),
        (
            [{"question": "b"}, {"prompt": "a"}],
            r":1: .*; fix the line, as other rows have it, or set --input-key",
        ),
        ([{"question": "a"}, {"question": "b"}], r":1: .*\['question'\]; set --input-key"),
    ],
)
def test_a_column_that_one_row_lacks_is_an_error_of_the_line(tmp_path, rows, remedy):
    path = write_lines(tmp_path / "d.jsonl", rows)
    with pytest.raises(ValueError, match=remedy):
        RolloutDataSourceWithBuffer(make_args(prompt_data=path))
