"""Tests prompt files as tables of `datasets`: every kind of source, the cached facts, and each named error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_double import make_tokenizer, write_lines

from slime.data import prompts as module
from slime.data import rows as row_module
from slime.data.files import find_source, prompt_files, read_table
from slime.data.prompts import load_prompts, read_file
from slime.data.rows import RowColumns

COLUMNS = RowColumns("prompt", "label")
ROWS = [{"prompt": f"q{i}", "label": str(i)} for i in range(5)]


def write_arrow(path: Path, rows: list, *, stream: bool = False) -> str:
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def texts(spec: str) -> list[str]:
    return [prompt.text for prompt in load_prompts(spec, COLUMNS)]


@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files_and_streams(tmp_path, stream):
    path = write_arrow(tmp_path / "d.arrow", ROWS, stream=stream)
    assert list(read_file(path)) == ROWS
    assert texts(path + "@[-2:]") == ["q3", "q4"]
    wrong = write_arrow(tmp_path / "e.arrow", [*ROWS, {"prompt": None, "label": "5"}], stream=stream)
    with pytest.raises(ValueError, match=r"e\.arrow: row 6: column 'prompt' is empty"):
        texts(wrong)


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    write_lines(tmp_path / "b" / "1.jsonl", ROWS[2:4])
    write_lines(tmp_path / "b" / "0.jsonl", ROWS[:2])
    write_lines(tmp_path / "b" / "deep" / "0.jsonl", ROWS[4:])
    (tmp_path / "b" / "empty.jsonl").touch()
    (tmp_path / "b" / "README.md").touch()
    folder = str(tmp_path / "b")
    assert texts(folder) == ["q0", "q1", "q2", "q3", "q4"]
    assert texts(folder + "@[1:-1]") == ["q1", "q2", "q3"]
    assert [path.name for path in prompt_files(folder)] == ["0.jsonl", "1.jsonl", "0.jsonl", "empty.jsonl"]
    write_lines(tmp_path / "b" / "1.jsonl", [ROWS[2], {"prompt": 5, "label": "1"}])
    with pytest.raises(ValueError, match=r"b/1\.jsonl:2: column 'prompt' must be a string"):
        texts(folder)
    (tmp_path / "b" / "x.csv").write_text("prompt,label\n")
    with pytest.raises(
        ValueError, match=r"--prompt-data must name a folder with files of one kind .*got \.csv, \.jsonl"
    ):
        texts(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="--prompt-data must name a folder .*got none in"):
        texts(str(tmp_path / "none"))


def test_folders_of_json_and_parquet_name_file_and_row(tmp_path):
    for name in ("j", "p"):
        (tmp_path / name).mkdir()
    for number, rows in enumerate([ROWS[:2], [ROWS[2], {"prompt": "", "label": "x"}]]):
        (tmp_path / "j" / f"{number}.json").write_text(json.dumps(rows))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p" / f"{number}.parquet")
    assert texts(str(tmp_path / "j") + "@[:3]") == texts(str(tmp_path / "p") + "@[:3]") == ["q0", "q1", "q2"]
    with pytest.raises(ValueError, match=r"j/1\.json: entry 2: column 'prompt' must hold a prompt"):
        texts(str(tmp_path / "j"))
    with pytest.raises(ValueError, match=r"p/1\.parquet: row 2: column 'prompt' must hold a prompt"):
        texts(str(tmp_path / "p"))


@pytest.mark.parametrize(
    ("part", "want"),
    [
        ("@[:2]", "q0 q1"),
        ("@[1:3]", "q1 q2"),
        ("@[-1:]", "q4"),
        ("@[:-4]", "q0"),
        ("@[2:99]", "q2 q3 q4"),
        ("@[:]", "q0 q1 q2 q3 q4"),
    ],
)
def test_a_slice_counts_no_empty_lines_and_reads_only_its_rows(tmp_path, part, want):
    path = tmp_path / "d.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    assert texts(str(path) + part) == want.split()
    path.write_text("{\n" + path.read_text())
    with pytest.raises(ValueError, match=r"d\.jsonl:1: line must be JSON"):
        texts(str(path))
    assert texts(str(path) + "@[1:3]") == ["q0", "q1"]


def test_values_are_those_of_the_file(tmp_path):
    """A JSON reader that guesses types would turn the first label into a date and give both rows all fields."""
    rows = [
        {"prompt": "a\u2028b", "label": "2024-01-01", "metadata": {"a": 1}},
        {"prompt": [{"role": "user", "content": "hi"}], "label": 7, "metadata": {"b": [None, "x"]}},
        {"prompt": "c", "label": {"deep": [1.5, True]}, "metadata": None},
    ]
    want = [(row["prompt"], row["label"], row["metadata"] or {}) for row in rows]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "e.jsonl").write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    for name in ("d.json", "e.jsonl"):
        read = load_prompts(str(tmp_path / name), COLUMNS)
        assert [(prompt.text, prompt.label, prompt.metadata) for prompt in read] == want
    (tmp_path / "d.csv").write_bytes('\ufeffprompt,label\r\n"a\nb",01\n\nNA,""\n'.encode())
    assert list(read_file(str(tmp_path / "d.csv"))) == [
        {"prompt": "a\nb", "label": "01"},
        {"prompt": "NA", "label": ""},
    ]


def test_lines_of_csv_errors(tmp_path):
    for name, content, message in [
        ("a", 'prompt,label\n"x\ny",1\nz,2,3\n', r":4: line must have 2 fields as the header does"),
        ("b", 'prompt,label\n"x\ny",1\nz\n', r":4: line must have 2 fields as the header does"),
        ("c", 'prompt,label\n"x\ny",1\n"",2\n', r":4: column 'prompt' must hold a prompt"),
        ("d", "prompt,prompt\nx,1\n", r":1: columns must have different names"),
    ]:
        (tmp_path / f"{name}.csv").write_text(content)
        with pytest.raises(ValueError, match=message):
            texts(str(tmp_path / f"{name}.csv"))


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.parquet", "d.arrow"])
def test_an_empty_file_has_no_prompts(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"--prompt-data must hold at least one prompt, got none in .*/d\."):
        texts(str(tmp_path / name))


def test_files_without_rows_have_no_prompts(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,label\n")
    (tmp_path / "d.jsonl").write_text("\n \n")
    (tmp_path / "d.json").write_text("[]")
    pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "d.parquet")
    for name in ("d.csv", "d.jsonl", "d.json", "d.parquet"):
        for part in ("", "@[:3]"):
            with pytest.raises(ValueError, match="must hold at least one prompt"):
                texts(str(tmp_path / name) + part)


def test_a_truncated_binary_file_is_named(tmp_path):
    whole = tmp_path / "w.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), whole)
    write_arrow(tmp_path / "w.arrow", ROWS)
    for kind in ("parquet", "arrow"):
        content = (tmp_path / f"w.{kind}").read_bytes()
        (tmp_path / f"cut.{kind}").write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(
            ValueError, match=rf"cut\.{kind}: file must be {kind.title()} \(.+\); write it again"
        ):
            texts(str(tmp_path / f"cut.{kind}"))


def test_a_changed_file_is_read_anew_and_checks_are_remembered(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "d.jsonl", ROWS)
    tokenizer = make_tokenizer()
    columns = RowColumns("prompt", apply_chat_template=True)
    rendered = []
    render = row_module.render_chat
    monkeypatch.setattr(row_module, "render_chat", lambda *a, **k: rendered.append(a[0]) or render(*a, **k))

    def load(**changes):
        rendered.clear()
        return load_prompts(path, columns, tokenizer=tokenizer, max_prompt_len=99, **changes)

    first = load()
    assert len(rendered) == 2 * len(ROWS), "one check and one count"
    assert len(load()) == 5 and not rendered, "remembered"
    assert first[4].text == load()[-1].text and len(rendered) == 1, "rendered when it is taken"
    assert [prompt.text for prompt in first[1:3]] == [first[1].text, first[2].text]
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    assert load()[0].text == "q0!" and len(rendered) == 11
    status = os.stat(path)
    changed = [{**row, "prompt": "r" + row["prompt"][1:]} for row in ROWS]
    write_lines(Path(path), changed)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time
    assert load()[0].text == "r0!"


def test_several_processes_check_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROWS_PER_PROCESS", 50)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    rows = [{"prompt": f"q{i}"} for i in range(150)]
    path = write_lines(tmp_path / "d.jsonl", rows)
    assert [prompt.text for prompt in load_prompts(path, RowColumns("prompt"))] == [r["prompt"] for r in rows]
    rows[120] = {"prompt": 1}
    write_lines(Path(path), rows)
    with pytest.raises(ValueError, match=r"d\.jsonl:121: column 'prompt' must be a string"):
        load_prompts(path, RowColumns("prompt"))


def test_a_hub_name_is_told_from_a_path():
    assert find_source("openai/gsm8k:main:train@[:100]").name == "openai/gsm8k:main:train"
    assert find_source("gsm8k").files == () and find_source("gsm8k@[2:]").part == slice(2, None)
    for path in ("./gsm8k", "/data/gsm8k", "a/b/c", "data/train.jsonl"):
        with pytest.raises(ValueError, match=r"--prompt-data must (be a file of kind|name an existing file)"):
            find_source(path)


def test_a_hub_name_without_a_network_is_an_error_that_says_so(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        read_table(find_source("nobody/no-such-data:main", "--eval-prompt-data"))
    assert str(error.value).startswith(
        "--eval-prompt-data must name a file, a folder or a dataset NAME[:CONFIG[:SPLIT]] of the Hugging Face hub, "
        "got nobody/no-such-data:main, which is no file, and the hub does not answer ("
    )
    assert str(error.value).endswith("check the path, or the network and HF_HUB_OFFLINE")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    import datasets

    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(
        ValueError,
        match=r"HF_DATASETS_CACHE must be a folder that can be written, got .*file/cache \(.+\); set",
    ):
        texts(write_lines(tmp_path / "d.jsonl", ROWS))


START = """
import json, sys, time, types, psutil
from slime.data.source import PromptDataSource
flags = json.loads(sys.argv[1])
source = PromptDataSource(types.SimpleNamespace(**flags))
group = source.get_samples(256)
seconds = time.process_time()
memory = psutil.Process().memory_full_info()
print(json.dumps(dict(seconds=seconds, rss=memory.rss, uss=memory.uss, number=len(source), last=group[-1][0].prompt)))
"""


@pytest.mark.slow
def test_ten_million_prompts(tmp_path):
    """The second start takes seconds of CPU, and a process with the prompts has less than 1 GiB."""
    number = 10_000_000
    with (tmp_path / "d.jsonl").open("w") as file:
        for start in range(0, number, 100_000):
            file.writelines(
                f'{{"prompt": "What is {i} + {i}?", "label": "{2 * i}"}}\n'
                for i in range(start, start + 100_000)
            )
    flags = dict(prompt_data=str(tmp_path / "d.jsonl"), rollout_shuffle=True, rollout_seed=42)
    flags |= dict(input_key="prompt", label_key="label", metadata_key="metadata", tool_key="tools")
    flags |= dict(apply_chat_template=False, apply_chat_template_kwargs={}, hf_checkpoint=None)
    flags |= dict(rollout_max_prompt_len=None, rollout_max_context_len=None, loss_type="policy_loss")
    flags |= dict(disable_rollout_global_dataset=False, buffer_filter_path=None, n_samples_per_prompt=1)
    command = [sys.executable, "-c", START, json.dumps(flags)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    results = []
    for _ in range(2):
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        results.append({**json.loads(done.stdout), "process_seconds": time.monotonic() - began})
    print(results)
    first, second = results
    assert first["number"] == second["number"] == number and first["last"] == second["last"]
    assert second["seconds"] < 10 and second["rss"] < 2**30 and first["rss"] < 2**30
