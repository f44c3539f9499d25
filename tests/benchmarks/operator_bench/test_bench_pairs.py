"""Tests which rows of operator_bench are compared, the allowed verdicts, and the text of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_runs import rows_of, run
from operator_bench.pairs import (
    NO_CALLS,
    NO_KERNEL,
    Pair,
    check,
    linear_pairs,
    median_ratio,
    sign_rank,
    stream_pairs,
    unfit,
)
from operator_bench.report import linear_lines, result_lines, table
from operator_bench.timing import CallTimes

KERNEL = {"linear_logp": "triton"}


def old_times(median: float, least: float, most: float, calls: int = 11) -> dict[str, Any]:
    """Returns times as older records store them, without single calls."""
    return {"median": median, "min": least, "max": most, "calls": calls}


def a_row(name: str, ms: dict[str, Any], operator: str = "rival", **more: Any) -> dict[str, Any]:
    row = {"name": name, "operator": operator, "phase": "train", "entropy": "none", "upstream": "plain"}
    row |= {"main_grad": False, "workspace_mib": 1536 if operator != "rival" else None}
    row |= {"ms": ms, "extra_mib": 10.0, "errors": {"log_prob": 1e-3}, "implementation": KERNEL, "ratio": 1.5}
    return row | more


def calls(*ms: float) -> dict[str, Any]:
    return CallTimes(tuple(ms)).each_as_json()


def test_the_interval_is_between_the_ranks_of_the_sign_test() -> None:
    # P(Binomial(11, 1/2) < 2) = 12/2048: the second smallest and second largest value enclose 98.8 %. For 5 values,
    # even the smallest and largest enclose too little.
    assert [sign_rank(rounds) for rounds in (1, 5, 6, 8, 9, 11, 12)] == [None, None, 1, 1, 2, 2, 3]
    ratios = [0.9, 0.5, 0.8, 0.6, 0.7, 0.65, 0.55, 0.75, 0.85, 0.95, 9.0]
    found = median_ratio([2 * ratio for ratio in ratios], [2.0] * 11)
    assert found is not None and (found.value, found.rounds) == (0.75, 11)
    assert (found.low, found.high) == (0.55, 0.95)
    assert found.words == "faster", "one delayed call does not hide a difference"
    assert median_ratio([], [1.0]) is None


def test_equal_contenders_are_seldom_called_different() -> None:
    """The times drift together and have spikes. At most 5 % of 2,000 pairs without a difference may show one."""
    random = np.random.default_rng(7)
    shown = 0
    for _ in range(2000):
        drift = 1 + 0.1 * random.standard_normal(11).cumsum()[:, None] / 11
        ms = drift * (1 + 0.02 * random.standard_normal((11, 2)) + 0.5 * (random.random((11, 2)) < 0.05))
        found = median_ratio(ms[:, 0].tolist(), ms[:, 1].tolist())
        assert found is not None
        shown += found.words in ("faster", "slower")
    assert shown / 2000 < 0.05


@pytest.mark.parametrize(
    ("rival", "ours", "words"),
    [
        (calls(*[2.0] * 7), calls(1.0, 1.1, 1.2, 1.0, 1.1, 1.3, 1.9), "faster"),
        (calls(*[1.0] * 7), calls(*[1.5] * 7), "slower"),
        (
            calls(*[1.0] * 7),
            calls(0.99, 1.02, 1, 1.01, 1.03, 0.98, 1.02),
            "no difference shown (within 3.0 %)",
        ),
        (calls(*[2.0] * 5), calls(*[1.0] * 7), "none: 5 rounds are too few"),
        (old_times(2.0, 1.9, 2.1), old_times(1.0, 0.9, 1.1), "faster"),
        (old_times(1.0, 0.9, 1.1), calls(*[2.0] * 7), "slower"),
        (old_times(2.0, 1.0, 2.1), old_times(1.2, 0.9, 1.3), NO_CALLS),
        (old_times(9.0, 8.0, 9.9, calls=3), old_times(1.0, 0.9, 1.1), "none: 3 rounds are too few"),
    ],
)
def test_words_say_what_the_calls_show(rival: dict[str, Any], ours: dict[str, Any], words: str) -> None:
    assert Pair(a_row("ours", ours, "linear_logp"), a_row("native", rival)).words == words
    for more in ({"implementation": {"linear_logp": "reference"}}, {"fallbacks": ["the dtype"]}):
        assert Pair(a_row("ours", ours, "linear_logp", **more), a_row("native", rival)).words == NO_KERNEL


def test_each_operator_is_compared_with_what_does_the_same() -> None:
    same = calls(*[1.0] * 6)
    rows = [
        a_row("logp 512", calls(*[0.1] * 6), "linear_logp", workspace_mib=512),
        a_row("logp 1536", same, "linear_logp"),
        a_row("logp unlimited", calls(*[0.1] * 6), "linear_logp", workspace_mib="unlimited"),
        a_row("logp 1536 fp32", same, "linear_logp"),
        a_row("loss entropy", same, "linear_token_loss", entropy="metric"),
        a_row("loss main", same, "linear_token_loss", main_grad=True),
        a_row("loss grpo", same, "linear_token_loss", main_grad=True, upstream="grpo"),
        a_row("native", same),
        a_row("native entropy", same, entropy="metric"),
        a_row("its gradient", same, entropy="gradient"),
        a_row("odd", same, errors={"d_hidden": 0.2, "log_prob": None}),
        {"name": "lost", "operator": "rival", "skipped": "out of memory"},
    ]
    pairs, unmatched = linear_pairs(rows)
    # The comparison uses the default workspace although others were faster, the same use of the entropy, and both
    # places of the gradient.
    assert [(pair.ours["name"], pair.rival["name"]) for pair in pairs] == [
        ("logp 1536", "native"),
        ("loss entropy", "native entropy"),
        ("loss main", "native"),
    ]
    assert unmatched == [
        ("odd", "its results are off: log_prob not finite, allowed 0.05; d_hidden 0.2, allowed 0.05"),
        ("lost", "out of memory"),
        ("its gradient", "no row of rl_kernel did the same"),
    ]
    assert [unfit(row) is None for row in rows[-3:]] == [True, False, False]
    product = old_times(1.0, 0.9, 1.1) | {"calls": 6}
    case = {"name": "T", "tokens": 1000, "hidden": 2, "vocab": 3}
    facts = {"case": case, "product_ms": product, "product_tflops": 7.0, "floor_ms": 3.0}
    lines = list(linear_lines({**facts, "rows": rows}))
    assert lines[0] == "#### T: 1,000 tokens, hidden 2, vocabulary 3"
    assert "- lost: not compared, as out of memory" in lines
    (row,) = [line for line in lines if line.startswith("| logp 1536 ") and " native " in line]
    assert [cell.strip() for cell in row.split("|")[3:-1]] == ["1.000", "1.000 to 1.000", "10, 10", "equal"]


def test_operators_that_move_bytes_are_compared_with_their_own_rivals() -> None:
    ours = a_row("swiglu forward", calls(*[1.0] * 7), "swiglu", implementation={"swiglu": "triton"})
    reference = a_row("swiglu forward: reference", calls(*[3.0] * 7), against="swiglu forward")
    broken = a_row("swiglu forward: compile", calls(*[0.1] * 7), against="swiglu forward", error=None)
    alone = {"name": "rotary forward: reference", "operator": "rival", "against": "rotary forward"}
    rotary = {"name": "rotary forward", "operator": "rotary", "skipped": "out of memory"}
    alone |= {"skipped": "RuntimeError: no"}
    pairs, unmatched = stream_pairs([ours, reference, broken, rotary, alone])
    assert [(p.ours["name"], p.rival["name"], p.words) for p in pairs] == [
        ("swiglu forward", "swiglu forward: reference", "faster")
    ]
    assert unmatched == [
        ("swiglu forward: compile", "its results are not finite"),
        ("rotary forward", "out of memory"),
        ("rotary forward: reference", "RuntimeError: no"),
    ]


@pytest.mark.slow
def test_references_stand_beside_the_operators(tmp_path: Path) -> None:
    """Runs references and compiled references on a CPU, and checks the rows and the whole report."""
    from torch._dynamo.utils import counters

    counters.clear()
    names = "linear_logp", "logp", "swiglu", "--cases", "tiny", "--rivals", "reference,compile,cce"
    result = run(tmp_path, *names)
    assert not counters["graph_break"]
    rows = rows_of(result["linear"][0])
    assert rows["linear_logp reference"]["implementation"] == {"linear_logp": "reference"}
    rows = rows_of(result["elementwise"])
    beside = {name: row["against"] for name, row in rows.items() if row["operator"] == "rival"}
    assert beside["logp forward: reference"] == "logp forward"
    assert beside["swiglu forward+backward: compile"] == "swiglu forward+backward"
    # An in-place backward leaves no logits for a second contender, and only whole references are compiled.
    assert not any("in place" in name for name in beside) and "logp forward: compile" not in rows
    for name, row in rows.items():
        assert row["error"] < 4 * 2**-8, name
        assert len(row["ms"]["each"]) == row["ms"]["calls"] == result["rounds"]
    assert rows["swiglu forward"]["fallbacks"] and "fallbacks" not in rows["swiglu forward: reference"]
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert all(line.count(",") >= 5 for line in lines if '"each": [' in line), (
        "the calls of a row share a line"
    )
    text = "\n".join(result_lines(result))
    assert "No GPU: these times show that the benchmark works" in text and text.count(NO_KERNEL) > 5
    assert "- cce exact: not compared, as not importable (No module named 'cut_cross_entropy')" in text
    assert "ran the PyTorch reference (the tensors are on cpu and the kernels need a CUDA device)" in text
    assert all(f"| {name} " in text for name in rows)


def test_columns_are_aligned_for_a_terminal() -> None:
    assert table(("row", "ms"), [["a", "1.000"], ["longer", "-"]]) == [
        "| row    |    ms |",
        "| ------ | ----: |",
        "| a      | 1.000 |",
        "| longer |     - |",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must be of schema 1"),
        ({"schema": 0}, "must be of schema 1; measure again with this version"),
        ({"schema": 1, "linear": []}, "must say elementwise, machine"),
        ({"rows": [{"name": "a"}]}, "a must have a time or say why it has none"),
        (
            {"rows": [a_row("a", {"median": 0.0, "min": 1, "max": 1})]},
            r"times must be numbers > 0, got \[0.0\]",
        ),
    ],
)
def test_what_is_no_result_is_refused(content: Any, message: str) -> None:
    if isinstance(content, dict) and "rows" in content:
        content = {"schema": 1, "machine": {}, "linear": [], "elementwise": content}
    with pytest.raises(ValueError, match=message):
        check(content, "operators.json")
