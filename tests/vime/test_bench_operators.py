"""operators.json in a report: real runs of rl_kernel.bench, the results in the repository, and rows of known truth."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench_cases import full_steps

from rl_kernel.benchmarks.timing import HostClock, Samples, take_turns
from vime.bench import command, report
from vime.bench.operator_pictures import case_picture, groups_of
from vime.bench.operators import NO_CALLS, NO_KERNEL, OPERATORS_FILE, Case, Match, cases_of, read_operators
from vime.bench.statistics import median_ratio, sign_rank

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "operators_h200.json"
KERNEL = {"linear_logp": "triton"}


def old_times(median: float, least: float, most: float, calls: int = 11) -> dict:
    """As files kept them before single calls."""
    return {"median": median, "min": least, "max": most, "calls": calls}


def a_row(name: str, ms: dict, operator: str = "rival", **more) -> dict:
    row = {"name": name, "operator": operator, "phase": "train", "entropy": "none", "upstream": "plain"}
    row |= {"main_grad": False, "workspace_mib": 1536 if operator != "rival" else None}
    row |= {"ms": ms, "extra_mib": 10.0, "errors": {"log_prob": 1e-3}, "implementation": KERNEL}
    return row | more


def a_match(rival: dict, ours: dict) -> Match:
    return Match("linear_logp", a_row("ours", ours, "linear_logp"), a_row("native", rival))


def calls(*ms: float) -> dict:
    return Samples(tuple(ms)).each_as_json()


def test_the_interval_is_between_the_ranks_of_the_sign_test():
    # P(Binomial(11, 1/2) < 2) = 12/2048: 98.8 % between second least and second largest; with 5 not even the ends do
    assert [sign_rank(rounds) for rounds in (1, 5, 6, 8, 9, 11, 12)] == [None, None, 1, 1, 2, 2, 3]
    ratios = np.array([0.9, 0.5, 0.8, 0.6, 0.7, 0.65, 0.55, 0.75, 0.85, 0.95, 9.0])
    found = median_ratio(np.full(11, 2.0), 2 * ratios)
    assert found is not None and found.value == pytest.approx(-0.25)
    assert (found.low, found.high) == (pytest.approx(-0.45), pytest.approx(-0.05)) and found.steps == 11
    assert found.shown, "one call that was held up does not hide a difference"
    assert median_ratio(np.array([]), np.array([1.0])) is None


def test_equal_contenders_are_seldom_called_different():
    """Times that drift together, with spikes: of 2,000 pairs without a difference at most 5 % may have one shown."""
    random = np.random.default_rng(7)
    shown = 0
    for _ in range(2000):
        drift = 1 + 0.1 * random.standard_normal(11).cumsum()[:, None] / 11
        ms = drift * (1 + 0.02 * random.standard_normal((11, 2)) + 0.5 * (random.random((11, 2)) < 0.05))
        found = median_ratio(ms[:, 0], ms[:, 1])
        assert found is not None
        shown += found.shown
    assert shown / 2000 < 0.05


@pytest.mark.parametrize(
    ("rival", "ours", "words"),
    [
        (calls(*[2.0] * 7), calls(1.0, 1.1, 1.2, 1.0, 1.1, 1.3, 1.9), "faster"),
        (calls(*[1.0] * 7), calls(*[1.5] * 7), "slower"),
        (
            calls(*[1.0] * 7),
            calls(0.99, 1.02, 1.0, 1.01, 1.03, 0.98, 1.02),
            "no difference shown (within 3.0 %)",
        ),
        (calls(*[2.0] * 5), calls(*[1.0] * 7), "none: 5 rounds are too few"),
        (old_times(2.0, 1.9, 2.1), old_times(1.0, 0.9, 1.1), "faster"),
        (old_times(1.0, 0.9, 1.1), calls(*[2.0] * 7), "slower"),
        (old_times(2.0, 1.0, 2.1), old_times(1.2, 0.9, 1.3), NO_CALLS),
        (old_times(9.0, 8.0, 9.9, calls=3), old_times(1.0, 0.9, 1.1), "none: 3 rounds are too few"),
    ],
)
def test_words_say_what_the_calls_show(rival, ours, words):
    assert a_match(rival, ours).words == words


def test_without_a_kernel_there_is_no_verdict():
    fast, slow = calls(*[1.0] * 7), calls(*[2.0] * 7)
    ours = a_row("ours", fast, "linear_logp", implementation={"linear_logp": "reference"})
    assert Match("linear_logp", ours, a_row("native", slow)).words == NO_KERNEL
    mixed = a_row("ours", fast, "linear_logp", fallbacks=["the dtype"])
    assert Match("linear_logp", mixed, a_row("native", slow)).words == NO_KERNEL


def test_calls_that_took_turns_pair_by_round():
    """Real contenders of rl_kernel.bench's clock: one does sixty times the work of the other."""
    values = np.random.default_rng(0).standard_normal((300, 300))

    def work(times: int):
        def step() -> None:
            for _ in range(times):
                values @ values

        return step

    timings = take_turns(work(1), {"one": work(1), "sixty": work(60)}, rounds=11, clock=HostClock())
    one, sixty = (timings.contenders[name].each_as_json() for name in ("one", "sixty"))
    assert len(one["each"]) == len(sixty["each"]) == 11
    match = a_match(sixty, one)
    assert match.words == "faster" and match.value < 0.5
    assert match.ratio is not None and match.ratio.steps == 11


def linear(*rows: dict) -> dict:
    shape = {"name": "T", "tokens": 1, "hidden": 2, "vocab": 3}
    case = {"case": shape, "floor_ms": 1.0, "rows": list(rows), "comparisons": []}
    return {"linear": [case], "elementwise": None}


def test_each_operator_stands_beside_what_does_the_same():
    same = calls(*[1.0] * 6)
    content = linear(
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
        {**a_row("lost", same), "skipped": "out of memory"},
    )
    del content["linear"][0]["rows"][-1]["ms"]
    (case,) = cases_of(content)
    found = [(match.ours["name"], match.rival["name"]) for match in case.matches]
    # the default workspace although others were faster, the same use of the entropy, both places of the gradient
    assert found == [
        ("logp 1536", "native"),
        ("loss entropy", "native entropy"),
        ("loss main", "native"),
    ]
    assert case.unmatched == [
        ("odd", "its results are off: log_prob not finite, allowed 0.05; d_hidden 0.2, allowed 0.05"),
        ("lost", "out of memory"),
        ("its gradient", "no row of rl_kernel did the same"),
    ]


def test_operators_that_move_bytes_stand_beside_their_own_rivals():
    ours = a_row("swiglu forward", calls(*[1.0] * 7), "swiglu", implementation={"swiglu": "triton"})
    reference = a_row("swiglu forward: reference", calls(*[3.0] * 7), against="swiglu forward")
    broken = a_row("swiglu forward: compile", calls(*[0.1] * 7), against="swiglu forward", error=None)
    alone = {"name": "rotary forward: reference", "operator": "rival", "against": "rotary forward"}
    rotary = {"name": "rotary forward", "operator": "rotary", "skipped": "out of memory"}
    rows = [ours, reference, broken, rotary, alone | {"skipped": "RuntimeError: no"}]
    (case,) = cases_of({"linear": [], "elementwise": {"copy_gbs": 1.0, "rows": rows}})
    assert [(m.operator, m.ours["name"], m.rival["name"], m.words) for m in case.matches] == [
        ("swiglu", "swiglu forward", "swiglu forward: reference", "faster")
    ]
    assert case.unmatched == [
        ("swiglu forward: compile", "its results are not finite"),
        ("rotary forward", "out of memory"),
        ("rotary forward: reference", "RuntimeError: no"),
    ]


def test_a_run_on_a_cpu_becomes_a_report(tmp_path, capsys):
    out = tmp_path / "op"
    line = [
        "op",
        "linear_logp",
        "swiglu",
        "--device",
        "cpu",
        "--cases",
        "tiny",
        "--rivals",
        "reference,native,cce",
    ]
    assert command.main([*line, "--out", str(out)]) == 0
    text = (out / OPERATORS_FILE).read_text()
    assert (
        all(len(line) < 200 for line in text.splitlines() if '"each"' in line) and text.count('"each"') > 10
    )
    assert report.main([str(out)]) == 0
    shown = (out / "report" / "report.md").read_text()
    assert "No GPU: these times show that the benchmark works" in shown
    rows = [line for line in shown.splitlines() if line.startswith("| linear_logp 1.5GiB bf16 | native |")]
    assert len(rows) == 1 and rows[0].endswith(f"| not measured, not measured | {NO_KERNEL} |")
    low, high = (float(x) for x in rows[0].split("|")[6].split(" to "))
    assert low <= float(rows[0].split("|")[5]) <= high
    assert "- cce exact: not compared, as not importable (No module named 'cut_cross_entropy')" in shown
    assert "ran the PyTorch reference (the tensors are on cpu and the kernels need a CUDA device)" in shown
    assert "linear_logp forward bf16, " in shown and "swiglu forward, swiglu forward+backward" in shown
    beside = [
        line.split(" | ")[1] for line in shown.splitlines() if line.startswith("| swiglu forward | ref")
    ]
    assert beside == ["reference"]
    own = [line for line in shown.splitlines() if "linear_logp reference" in line]
    assert len(own) == 1 and own[0].startswith("| linear_logp 1.5GiB bf16 | linear_logp reference |")
    assert (out / "report" / "operators-1-tiny.png").stat().st_size > 10_000


def test_the_measured_file_has_no_interval_and_says_so(tmp_path, capsys):
    (tmp_path / "op").mkdir()
    (tmp_path / "e2e").mkdir()
    (tmp_path / "op" / OPERATORS_FILE).write_bytes(MEASURED.read_bytes())
    full_steps(repeats=1, steps=4).write(tmp_path / "e2e")
    out = tmp_path / "report"
    assert report.main([str(tmp_path / "e2e"), str(tmp_path / "op"), "--out", str(out)]) == 0
    operators, _, steps = (out / "report.md").read_text().partition("## Full steps")
    assert "- **Hardware** NVIDIA H200, driver 580.159.04" in operators
    assert "there is **no interval**" in operators
    times = "1.294 (1.26 to 1.467) | 2.428 (2.359 to 2.724)"
    assert (
        f"| linear_logp 1.5GiB bf16 | native | {times} | 0.533 | none | 122, 162 | **faster** |" in operators
    )
    assert "- cce (filters gradients): not compared, as its results are off: d_weight_other 0.36" in operators
    assert "| logp forward | 0.3173" in operators and "linear_logp" not in steps.partition("<details>")[0]
    assert len(list(out.glob("operators-1-*.png"))) == 6
    assert all(Path(line).is_file() for line in capsys.readouterr().out.split())


def test_bars_begin_at_zero_and_a_cut_one_says_its_number():
    match = a_match(old_times(500.0, 490.0, 510.0), calls(*[0.9] * 3, 1.0, *[1.1] * 3))
    case = Case("T", "", [match], [], floor_ms=0.8)
    ((ours, rival),) = [group.bars for group in groups_of(case)]
    assert (ours.name, ours.median, ours.least, ours.most, ours.mib) == ("ours", 1.0, 0.9, 1.1, 10.0)
    assert (rival.name, rival.ours) == ("native", False)
    (axes,) = case_picture(case).axes
    assert axes.get_xlim() == (0, 4.0) and {bar.get_x() for bar in axes.patches} == {0}
    assert "500 ms, 10 MiB \N{RIGHTWARDS ARROW}" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"schema": 0}, "must be of schema 1; measure again with this version"),
        ({"schema": 1, "linear": []}, "must say elementwise, machine"),
        ({"schema": 1, "machine": {}} | linear({"name": "a"}), "a must have a time or say why it has none"),
        (
            {"schema": 1, "machine": {}} | linear(a_row("a", {"median": 0.0, "min": 1, "max": 1})),
            r"a: times must be numbers > 0, got \[0.0\]",
        ),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, content, message):
    (tmp_path / OPERATORS_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_operators(tmp_path)


def test_what_is_no_json_is_refused(tmp_path):
    (tmp_path / OPERATORS_FILE).write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        report.main([str(tmp_path)])
