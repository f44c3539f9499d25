"""Labels of built-in rewards are checked while a prompt file is read; the error has file and line."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_double import make_args

from slime.config.schema import Config
from slime.data.prompts import load_prompts
from slime.data.rows import RowColumns
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rewards import REWARDS
from slime.rollout.rewards.labels import _CHECKS, label_check

COLUMNS = RowColumns("prompt", "label")
GOOD = {"math": "1/2", "deepscaler": "x", "dapo": 34, "gsm8k": "#### 18", "gpqa": "C", "f1": "a cat"}
NO_LABELS = [[1], {"a": 1}, True, "", "  ", math.nan, math.inf, -math.inf]
WRONG = {
    **dict.fromkeys(GOOD, NO_LABELS),
    "gsm8k": [*NO_LABELS, "1/2", "3 1/2", "many", "12:30", "2^3", "1 or 2"],
    "f1": [*NO_LABELS, "the", "..."],
    "math": [*NO_LABELS, "nan", r"\boxed{", "solution\n#### "],
}


def load(path: Path, rows: list, name: str | None, **args):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check = label_check(Config.from_flat(dict(rm_type=name, **args)), "label")
    return load_prompts(str(path), COLUMNS, check_label=check)


def test_each_reward_has_a_check():
    # test_rewards_code.py has the labels of `code`
    # ifbench reads metadata and has its tests in test_ifbench.py
    assert set(_CHECKS) - {"code", "ifbench"} == set(REWARDS) - {"ifbench"} == set(GOOD)


@pytest.mark.parametrize(("name", "label"), [(name, label) for name in WRONG for label in WRONG[name]])
def test_wrong_label_is_an_error_with_file_and_line(tmp_path, name, label):
    rows = [{"prompt": "a", "label": GOOD[name]}] * 4
    assert len(load(tmp_path / "good.jsonl", rows, name)) == 4
    with pytest.raises(ValueError, match=r"d\.jsonl:5: column 'label'") as error:
        load(tmp_path / "d.jsonl", [*rows, {"prompt": "a", "label": label}], f"boxed_{name}")
    assert "--label-key" in str(error.value) or "--rm-type" in str(error.value)


@pytest.mark.parametrize("value", [datetime.date(2024, 1, 1), b"18", [1.0], float("nan"), None])
def test_wrong_label_of_parquet(tmp_path, value):
    pq.write_table(pa.table({"prompt": ["a"], "label": pa.array([value])}), path := tmp_path / "d.parquet")
    check = label_check(Config.from_flat(dict(rm_type="math")), "label")
    with pytest.raises(ValueError, match=r"d\.parquet: row 1: column 'label'"):
        load_prompts(str(path), COLUMNS, check_label=check)


@pytest.mark.parametrize("name", sorted(GOOD))
@pytest.mark.parametrize(
    "value", [datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), b"C", ["C"], {"a": "C"}, Decimal(1)]
)
def test_a_label_of_another_type_is_refused_by_each_reward(tmp_path, name, value):
    """Without this error, gpqa would read the label's text: a date or ["C"] would match a choice with that text."""
    metadata = {"choices": ["2024-01-01", "b'C'", "C", "1", "2024-01-01 00:00:00", "{'a': 'C'}"]}
    rows = {"prompt": ["a"], "label": pa.array([value]), "metadata": [metadata]}
    pq.write_table(pa.table(rows), path := tmp_path / "d.parquet")
    check = label_check(Config.from_flat(dict(rm_type=name)), "label")
    with pytest.raises(ValueError, match=r"d\.parquet: row 1: column 'label'"):
        load_prompts(str(path), COLUMNS, check_label=check)


def test_an_unknown_reward_of_a_row_is_named(tmp_path):
    rows = [{"prompt": "a", "label": "1", "metadata": {"rm_type": name}} for name in ("f1", "mth")]
    with pytest.raises(ValueError, match=r"d\.jsonl:2: .*rm_type must be one of .*got 'mth'"):
        load(tmp_path / "d.jsonl", rows, "math")
    assert len(load(tmp_path / "e.jsonl", rows, "math", custom_generate_function_path="a.b")) == 2


def test_the_reward_of_the_row_decides(tmp_path):
    rows = [{"prompt": "a", "label": "1/2", "metadata": {"rm_type": "math"}}, {"prompt": "a", "label": "2"}]
    assert len(load(tmp_path / "d.jsonl", rows, "gsm8k")) == 2
    rows[1]["metadata"] = {"rm_type": "boxed_gpqa"}
    with pytest.raises(
        ValueError, match=r"d\.jsonl:2: column 'label' must .*label must name the right choice"
    ):
        load(
            tmp_path / "d.jsonl",
            [rows[0], {**rows[1], "label": "zz", "metadata": {"rm_type": "gpqa", "choices": ["a", "b"]}}],
            "math",
        )
    with pytest.raises(ValueError, match=r"d\.jsonl:1: column 'label'"):  # the reward of the evaluation
        check = label_check(Config.from_flat(dict(rm_type="math")), "label", "gsm8k")
        load_prompts(str(tmp_path / "d.jsonl"), COLUMNS, check_label=check)


def test_no_check_for_a_reward_of_the_user(tmp_path):
    rows = [{"prompt": "a", "label": [1, 2]}]
    assert len(load(tmp_path / "a.jsonl", rows, "math", custom_rm_path="my.reward")) == 1
    assert len(load(tmp_path / "b.jsonl", rows, None)) == 1
    assert len(load(tmp_path / "c.jsonl", rows, "remote_rm")) == 1
    assert (
        label_check(Config.from_flat(dict(rm_type="math", custom_generate_function_path="a.b")), None) is None
    )
    for label in ("", math.nan):
        with pytest.raises(ValueError, match=r"d\.jsonl:1: column 'label' must hold a label"):
            load(tmp_path / "d.jsonl", [{"prompt": "a", "label": label}], None)


def test_the_data_source_checks_and_remembers_per_reward(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "label": "1/2"}\n')

    def source(**flags):
        return RolloutDataSourceWithBuffer(make_args(prompt_data=str(path), label_key="label", **flags))

    assert len(source(rm_type="math")) == 1
    with pytest.raises(
        ValueError, match=r"d\.jsonl:1: column 'label' must .*label must hold a number, and only one"
    ):
        source(rm_type="gsm8k")


def test_byte_order_mark_and_unused_columns(tmp_path):
    for name, data in (
        ("d.jsonl", b'\xef\xbb\xbf{"prompt": "a", "label": "1"}\n'),
        ("d.json", b'\xef\xbb\xbf[{"prompt": "a", "label": "1"}]'),
        ("d.csv", b"\xef\xbb\xbfprompt,label\na,1\n"),
    ):
        (tmp_path / name).write_bytes(data)
        assert [(p.text, p.label) for p in load_prompts(str(tmp_path / name), COLUMNS)] == [("a", "1")]
    unused = pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(
        pa.table({"prompt": ["a"], "label": ["1"], "unused": unused}), path := tmp_path / "m.parquet"
    )
    with pytest.raises(ValueError, match=r"m\.parquet: column 'unused' must not hold a map, got map"):
        load_prompts(str(path), COLUMNS)
