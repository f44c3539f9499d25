"""operators.json in a report: the results that are in the repository, and small ones with known truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cases import full_steps

from vime.bench import report
from vime.bench.operators import OPERATORS_FILE, Case, Match, _picture, cases_of, read_operators

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "operators_h200.json"


def times(median: float, least: float, most: float) -> dict:
    return {"median": median, "min": least, "max": most, "calls": 11}


def a_row(name: str, *ms: float, **more) -> dict:
    return {"name": name, "ms": times(*ms), "extra_mib": 10.0, **more}


def a_match(rival: tuple[float, ...], ours: tuple[float, ...]) -> Match:
    return Match(a_row("native", *rival), a_row("ours", *ours))


@pytest.mark.parametrize(
    ("rival", "ours", "words"),
    [
        ((2.0, 1.9, 2.1), (1.0, 0.9, 1.1), "faster"),
        ((1.0, 0.9, 1.1), (2.0, 1.9, 2.1), "slower"),
        ((2.0, 1.0, 2.1), (1.2, 0.9, 1.3), "no difference shown (ranges overlap)"),
    ],
)
def test_a_difference_is_shown_when_the_ranges_lie_apart(rival, ours, words):
    assert a_match(rival, ours).verdict == words


def test_the_measured_file_becomes_the_section_of_the_operators(tmp_path, capsys):
    (tmp_path / "op").mkdir()
    (tmp_path / "e2e").mkdir()
    (tmp_path / "op" / OPERATORS_FILE).write_bytes(MEASURED.read_bytes())
    full_steps(repeats=1, steps=4).write(tmp_path / "e2e")
    out = tmp_path / "report"
    assert report.main([str(tmp_path / "e2e"), str(tmp_path / "op"), "--out", str(out)]) == 0
    operators, _, steps = (out / "report.md").read_text().partition("## Full steps")
    assert (
        "- **Hardware** NVIDIA H200, driver 580.159.04" in operators and "- **Commit** 9d8fc7f" in operators
    )
    assert (
        "| native | linear_logp 1.5GiB bf16 | 2.428 (2.359 to 2.724) | 1.294 (1.26 to 1.467) | -46.7 % |"
        in operators
    )
    assert "- cce (filters gradients): not compared, as its results are not valid" in operators
    assert "| logp forward | 0.3173" in operators and "linear_logp" not in steps.partition("<details>")[0]
    assert len(list(out.glob("operators-1-*.png"))) == 6
    assert all(Path(line).is_file() for line in capsys.readouterr().out.split())


def test_rows_are_compared_once_and_failed_ones_are_named():
    result = {
        "case": {"name": "T", "tokens": 1, "hidden": 2, "vocab": 3},
        "rows": [
            a_row("ours", 1, 1, 1),
            a_row("native", 2, 2, 2),
            {"name": "lost", "skipped": "out of memory"},
        ],
        "comparisons": [{"rival": "native", "ours": "ours"}] * 2
        + [{"rival": "cce", "ours": None, "note": "why"}],
    }
    (case,) = cases_of({"linear": [result]})
    assert len(case.matches) == 1 and case.unmatched == [("cce", "why"), ("lost", "out of memory")]


def test_bars_begin_at_zero_and_a_cut_one_says_its_number():
    match = a_match((500.0, 490.0, 510.0), (1.0, 0.9, 1.1))
    (axes,) = _picture(Case("T", "", [match], [])).axes
    assert axes.get_xlim() == (0, 8.0) and {bar.get_x() for bar in axes.patches} == {0}
    assert "500 ms \N{RIGHTWARDS ARROW}" in [text.get_text() for text in axes.texts]


def test_another_schema_is_refused(tmp_path):
    (tmp_path / OPERATORS_FILE).write_text(json.dumps({"schema": 0}))
    with pytest.raises(ValueError, match="must be of schema 1; measure again with this version"):
        read_operators(tmp_path)
    (tmp_path / OPERATORS_FILE).write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        report.main([str(tmp_path)])
