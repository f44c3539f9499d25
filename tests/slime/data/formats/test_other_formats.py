"""Tests a prompt file that is almost right: another separator, another suffix, or a similar name of a column."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest

from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns


@pytest.mark.parametrize(
    ("key", "row", "near"),
    [
        ("Task", {"task": "x"}, "task"),
        ("task", {" Task ": "x", "other": 1}, " Task "),
        ("qestion", {"question": "x"}, "question"),
        ("reward_model.ground_thruth", {"reward_model": {"ground_truth": "1"}}, "reward_model.ground_truth"),
        ("absent", {"task": "x"}, None),
    ],
)
def test_a_column_that_is_missing_is_answered_with_the_nearest(tmp_path, key, row, near):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row | {"0": "x"}) + "\n")
    named = f", did you mean {near!r}?" if near else ""
    for columns, flag in (
        (RowColumns(input_key=key), "--input-key"),
        (RowColumns(input_key="0", label_key=key), "--label-key"),
    ):
        with pytest.raises(ValueError, match=f"column '{key}' is missing") as error:
            load_prompts(str(file), columns)
        assert str(error.value).endswith(f"set {flag}{named}")


@pytest.mark.parametrize(("sign", "name"), [(";", "a semicolon"), ("\t", "a tab"), ("|", "a vertical bar")])
def test_a_csv_with_another_separator_names_it(tmp_path, sign, name):
    file = tmp_path / "d.csv"
    file.write_text(f"prompt{sign}label\n1+1={sign}2\n1,5+1={sign}3\n")
    with pytest.raises(
        ValueError, match=f"d.csv:1: fields of a CSV must be separated by commas.*{name} in it"
    ) as error:
        load_prompts(str(file), RowColumns(input_key="prompt", label_key="label"))
    names = {"pandas": pandas}
    eval(str(error.value).partition("commas: ")[2], names)
    (first, second) = load_prompts(
        str(tmp_path / "d-commas.csv"), RowColumns(input_key="prompt", label_key="label")
    )
    assert (first.text, first.label, second.text) == ("1+1=", "2", "1,5+1=")


def test_a_single_column_may_have_such_a_name(tmp_path):
    file = tmp_path / "d.csv"
    file.write_text("prompt; in English\n1+1=\n")
    assert load_prompts(str(file), RowColumns(input_key="prompt; in English"))[0].text == "1+1="


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("d.tsv", "; to read it, write it as CSV with commas: pandas.read_csv("),
        ("d.xlsx", "; to read it, write it as CSV with commas: pandas.read_excel("),
        ("d.ndjson", "; to read it, rename it to d.jsonl"),
        ("d.jsonl.gz", "; to read it, unpack it"),
        ("d.txt", "; to read it, convert or rename it"),
    ],
)
def test_a_file_of_another_kind_names_what_to_do(tmp_path, monkeypatch, name, remedy):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("prompt\tlabel\n1+1=\t2\n")
    with pytest.raises(ValueError, match="must be a file of kind .jsonl, ") as error:
        load_prompts(name, RowColumns(input_key="prompt"))
    assert remedy in str(error.value)
    if name == "d.tsv":
        eval(str(error.value).partition("commas: ")[2], {"pandas": pandas})
        assert load_prompts("d.csv", RowColumns(input_key="prompt", label_key="label"))[0].label == "2"
