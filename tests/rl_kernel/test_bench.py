"""The benchmark: its command line on tiny shapes, and its arithmetic on timings that are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import rows_of, run

from rl_kernel import bench
from rl_kernel.benchmarks import report, rivals
from rl_kernel.benchmarks.contender import Contender
from rl_kernel.benchmarks.elementwise import share
from rl_kernel.benchmarks.linear import judge, timed
from rl_kernel.benchmarks.own import own_contenders
from rl_kernel.benchmarks.problem import LinearCase, Outputs, Problem
from rl_kernel.benchmarks.targets import Target, comparisons, is_valid, linear_target, verdict
from rl_kernel.benchmarks.timing import Samples, calls_within, reason_of, take_turns

CPU = torch.device("cpu")
TINY = LinearCase("tiny", 37, 16, 101)
BIG = LinearCase("big", 4096, 2560, 151936)
INF = float("inf")


def test_linear_operators_and_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "linear_logp", "linear_token_loss", "--cases", "tiny", "--rivals", "torch,native")
    printed = capsys.readouterr().out
    (case,) = result["linear"]
    assert case["case"] == {"name": "tiny", "tokens": 37, "hidden": 16, "vocab": 101}
    assert case["floor_ms"] == pytest.approx(3 * case["product_ms"]["median"], rel=1e-3)
    rows = rows_of(case)
    assert set(rows) >= {
        "linear_logp forward bf16",
        "linear_logp 512MiB bf16",
        "torch fp32",
        "native +entropy grad",
    }
    for name, row in rows.items():
        assert name in printed
        assert "skipped" not in row, (name, row["skipped"])
        ratio = row["ms"]["median"] / (row["products"] * case["product_ms"]["median"])
        assert row["ratio"] == pytest.approx(ratio, rel=1e-2)
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["ms"]["calls"] == result["rounds"]
        assert is_valid(row), (name, row["errors"])
        assert row["operator"] == "rival" or set(row["implementation"].values()) == {"reference"}
    assert rows["linear_logp unlimited fp32"]["errors"]["log_prob"] < 1e-5
    assert rows["linear_logp unlimited bf16"]["errors"]["log_prob"] > 1e-5
    assert "entropy" in rows["native +entropy"]["errors"]
    assert "d_hidden" not in rows["linear_logp forward bf16"]["errors"]
    assert "no targets here" in printed


def test_machine_record(tmp_path: Path) -> None:
    machine = run(tmp_path, "masked", "--commit", "abc")["machine"]
    assert (
        machine["command"] == "python -m rl_kernel.bench masked --commit abc --device cpu --out result.json"
    )
    assert machine["commit"] == "abc"
    assert machine["dirty"] is None
    assert machine["torch"] == torch.__version__
    assert {"date", "gpu", "gpu_facts", "cuda", "triton", "liger-kernel", "cut-cross-entropy"} <= set(machine)


def test_operators_that_move_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "logp", "ratio_kl", "grpo_loss", "swiglu", "rotary", "masked", "group_advantage")
    assert result["linear"] == []
    rows = rows_of(result["elementwise"])
    for name, row in rows.items():
        assert "skipped" not in row, (name, row.get("skipped"))
        # what a layer's operators return is rounded to bfloat16, twice or thrice
        assert row["error"] < (4 * 2**-8 if row["operator"] in ("swiglu", "rotary") else 1e-5)
        assert row["gbs"] == pytest.approx(row["moved_bytes"] / row["ms"]["median"] / 1e6, rel=0.5, abs=0.1)
    tokens = 2**12
    assert rows["masked_sum"]["moved_bytes"] == 5 * tokens
    assert rows["ratio_kl forward"]["moved_bytes"] == (4 + 4 + 4 + 1 + 4 + 4) * tokens
    assert rows["swiglu forward"]["moved_bytes"] == 64 * 3 * 96 * 2
    assert rows["swiglu forward+backward"]["moved_bytes"] == 64 * (3 + 5) * 96 * 2
    angles = 64 * 2 * 8 * 4
    assert rows["rotary key in a row forward"]["moved_bytes"] == 64 * 2 * 2 * 16 * 2 + angles
    assert rows["rotary query forward+backward"]["moved_bytes"] == 2 * (64 * 2 * 4 * 16 * 2 + angles)
    assert rows["logp forward+backward"]["moved_bytes"] >= 3 * 2 * 8 * 512
    names = {row["operator"] for row in rows.values()}
    assert names >= {"logp", "grpo_loss", "swiglu", "rotary", "masked_whiten", "group_advantage"}
    assert "of copy" in capsys.readouterr().out


def failing(error: Exception, at_call: int) -> Callable[[Problem], Callable[[], Outputs]]:
    def build(problem: Problem) -> Callable[[], Outputs]:
        calls = 0

        def step() -> Outputs:
            nonlocal calls
            calls += 1
            if calls >= at_call:
                raise error
            problem.hidden.grad, problem.weight.grad = problem.hidden.detach(), problem.weight.detach()
            return Outputs()

        if at_call == 0:
            raise error
        return step

    return build


@pytest.mark.parametrize(
    ("error", "at_call", "expected"),
    [
        (ImportError("no such library"), 0, "not importable (no such library)"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), 1, "out of memory"),
        (RuntimeError("odd shape\nsecond line"), 4, "RuntimeError: odd shape"),
    ],
    ids=["import", "memory", "while timed"],
)
def test_failing_rival_is_a_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    at_call: int,
    expected: str,
) -> None:
    monkeypatch.setitem(rivals.RIVALS, "broken", [Contender("broken", "rival", failing(error, at_call))])
    arguments = "linear_logp", "--cases", "tiny", "--rows", "broken,forward", "--rivals", "broken"
    rows = rows_of(run(tmp_path, *arguments)["linear"][0])
    assert rows["broken"]["skipped"] == expected
    assert "ms" not in rows["broken"]
    assert "ms" in rows["linear_logp forward bf16"]
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], "OP must be one of linear_logp"),
        (["--cases", "T9"], "--cases must name T1"),
        (["--rivals", "verl"], "--rivals must be all, none"),
        (["--workspace", "512,0"], "--workspace must list numbers of MiB > 0"),
        (["--workspace", "big"], "got 'big'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bench.main(["linear_logp", "--device", "cpu", "--cases", "tiny", "--rows", "forward fp32", "--trace"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "tiny: linear_logp forward fp32" in printed
    assert "aten::" in printed


def test_workspaces_replace_the_standard_ones() -> None:
    names = {row.name for row in own_contenders(["linear_logp", "linear_token_loss"], [64.0, INF])}
    assert {
        "linear_logp 64MiB bf16",
        "linear_logp unlimited bf16",
        "linear_token_loss 64MiB bf16 .grad",
    } <= names
    assert not any("512" in name or "1.5GiB" in name for name in names)


class FakeClock:
    """Time passes only where a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def call(self, ms: float) -> Callable[[], None]:
        def step() -> None:
            self.now += ms

        return step

    def mark(self) -> float:
        return self.now

    def finish(self) -> None:
        self.now += 100.0

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start


def test_take_turns_times_each_call_against_the_yardstick() -> None:
    clock = FakeClock()
    resets = []
    timings = take_turns(
        clock.call(2.0),
        {"a": clock.call(7.0), "b": clock.call(3.0)},
        rounds=5,
        clock=clock,
        reset=lambda: resets.append(1),
        calls={"b": 3},
        fill_ms=7.0,
    )
    assert timings.contenders == {"a": Samples((7.0,) * 5), "b": Samples((3.0,) * 3)}
    assert timings.yardstick.ms == (2.0,) * 8
    assert len(resets) == 8 + 5
    row = timed(timings.contenders["a"], 3, timings.yardstick.median)
    assert row["ratio"] == pytest.approx(7 / 6, abs=1e-4)
    assert timed(Samples((2.0, 2.2, 3.0)), 1, 2.0) == {
        "ms": {"median": 2.2, "min": 2.0, "max": 3.0, "calls": 3, "each": [2.0, 2.2, 3.0]},
        "products": 1,
        "ratio": 1.1,
        "ratio_min": 1.0,
        "ratio_max": 1.5,
    }


def test_slow_contenders_take_part_in_fewer_rounds() -> None:
    assert calls_within(1000.0, 10.0, 11) == 11
    assert calls_within(1000.0, 125.0, 11) == 8
    assert calls_within(1000.0, 5000.0, 11) == 6
    assert calls_within(1000.0, 5000.0, 2) == 2


def test_reasons_name_no_folder_of_the_machine() -> None:
    error = ImportError("cannot import name 'x' from 'y' (" + "/opt" + "/site/y/__init__.py)")
    assert reason_of(error) == "not importable (cannot import name 'x' from 'y' (__init__.py))"
    assert reason_of(ValueError("")) == "ValueError: "


def test_linear_targets() -> None:
    def target(case: LinearCase, mib: float | None, operator: str = "linear_token_loss") -> Target | None:
        return linear_target(case, operator, "train", mib, None)

    assert [target(BIG, mib).limit for mib in (512, 1024, 1536, INF)] == [1.15, 1.15, 1.08, 1.05]
    assert target(BIG, 512).mib == 512
    assert target(BIG, INF).mib is None
    assert target(BIG, 256) is None
    assert target(BIG, INF, "linear_logp").limit == 1.08
    half = target(BIG, BIG.logits_mib / 2, "linear_logp")
    assert half.limit == pytest.approx((1.08 + 1.42) / 2)
    assert target(LinearCase("small", 796, 8, 8), 512).limit == 1.25
    assert target(LinearCase("middle", 1820, 8, 8), 512) is None
    assert linear_target(BIG, "linear_logp", "forward", None, None) == Target(1.10)
    assert linear_target(BIG, "linear_logp", "forward", None, "row") == Target(1.03, base="row")


def test_verdicts() -> None:
    row = {"name": "a", "ratio": 1.07, "ms": {"median": 10.7}, "extra_mib": 1536.5}
    assert verdict(Target(1.08, 1536), row, [row]) == (1.07, True)
    assert verdict(Target(1.06, 1536), row, [row]) == (1.07, False)
    assert verdict(Target(1.08, 1500), row, [row]) == (1.07, False)
    assert verdict(Target(1.08), {"skipped": "out of memory"}, [row]) is None
    on_top = {"name": "b", "ratio": 2.0, "ms": {"median": 11.0}}
    assert verdict(Target(1.03, base="a"), on_top, [row, on_top]) == (pytest.approx(11 / 10.7), True)
    assert verdict(Target(1.03, base="missing"), on_top, [row, on_top]) is None


def test_judge_writes_the_verdict_of_our_rows_only() -> None:
    ours = next(row for row in own_contenders(["linear_logp"]) if row.name == "linear_logp unlimited bf16")
    row: dict[str, Any] = {"name": ours.name, "ratio": 1.2, "ms": {"median": 1.0}}
    judge(BIG, ours, row, [row])
    assert row["target"] == {"limit": 1.08, "mib": None, "base": None, "value": 1.2}
    assert row["met"] is False
    other: dict[str, Any] = {"ratio": 1.2, "ms": {"median": 1.0}}
    judge(BIG, rivals.RIVALS["native"][0], other, [other])
    assert "target" not in other


def train_row(name: str, ms: float, mib: float, operator: str = "rival", **facts: Any) -> dict[str, Any]:
    row = {"name": name, "operator": operator, "phase": "train", "entropy": "none", "upstream": "plain"}
    row |= {"main_grad": False, "workspace_mib": None, "ms": {"median": ms}, "extra_mib": mib}
    return row | {"errors": {"log_prob": 1e-3, "d_hidden": 2e-3}} | facts


def test_comparisons_hold_rivals_against_rows_of_no_more_memory() -> None:
    rows = [
        train_row("small", 12.0, 400.0, "linear_token_loss", workspace_mib=512),
        train_row("middle", 10.0, 1500.0, "linear_token_loss", workspace_mib=1536),
        train_row("other gradient", 1.0, 0.0, "linear_token_loss", workspace_mib=512, main_grad=True),
        train_row("native", 15.0, 4000.0),
        train_row("thrifty", 11.0, 500.0),
        train_row("tiny", 30.0, 10.0),
        train_row("wrong", 1.0, 9e9, errors={"log_prob": 1e-3, "d_weight_other": 0.9}),
        train_row("broken", 1.0, 9e9, errors={"log_prob": None}),
    ]
    found = {(row["rival"], row.get("target")): row for row in comparisons(BIG, rows)}
    assert found["native", 1.6] == dict(rival="native", ours="middle", speedup=1.5, target=1.6, met=False)
    assert found["native", 1.0]["met"] is True
    assert found["thrifty", 1.0] == dict(
        rival="thrifty", ours="small", speedup=round(11 / 12, 4), target=1.0, met=False
    )
    assert found["tiny", None]["note"] == "no row of ours takes as little memory"
    assert found["wrong", None]["note"] == found["broken", None]["note"] == "its results are not valid"


def test_share_of_the_copy_bandwidth() -> None:
    assert share(4_000_000, 1.0, 4.0, True) == {
        "gbs": 4.0,
        "share": 1.0,
        "target": {"limit": 0.85},
        "met": True,
    }
    assert share(3_000_000, 1.0, 4.0, True)["met"] is False
    assert "met" not in share(3_000_000, 1.0, 4.0, False)


def test_summary_counts_and_names_what_is_missed() -> None:
    target = {"limit": 1.25, "base": None, "mib": None, "value": 1.2}
    rows = [
        {"name": "good", "target": target, "met": True},
        {"name": "bad", "target": {**target, "value": 1.3, "mib": 512.0}, "met": False},
        {"name": "dear", "target": {**target, "limit": 1.03, "base": "good", "value": 1.0625}, "met": False},
        {"name": "absent", "target": target},
        {"name": "free"},
    ]
    found = {"ours": "good", "rival": "other", "speedup": 0.9, "target": 1.0, "met": False}
    comparisons = [found, {"ours": None, "rival": "wrong"}]
    stream = {"name": "slow", "share": 0.8, "target": {"limit": 0.85}, "met": False}
    linear = {"case": {"name": "T1"}, "rows": rows, "comparisons": comparisons}
    assert report.summary_text({"linear": [linear], "elementwise": {"rows": [stream]}}).splitlines() == [
        "targets: 1 met, 4 missed, 1 not measured",
        "  MISSED T1 bad 1.300 x products, at most 1.25 in 512 MiB",
        "  MISSED T1 dear 1.062 x good, at most 1.03",
        "  MISSED T1 good beside other 0.90 x as fast, at least 1",
        "  MISSED bytes slow 0.80 of a copy, at least 0.85",
    ]
    assert "no targets here" in report.summary_text({"linear": [], "elementwise": None})


def test_truth_is_the_formula() -> None:
    problem = Problem(TINY, CPU)
    truth = problem.truth
    hidden = problem.hidden.detach().double().requires_grad_()
    weight = problem.weight.detach().double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    log_probs = log_p.gather(1, problem.targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(truth.log_probs, log_probs.detach())
    torch.testing.assert_close(truth.entropy, entropy.detach())
    for kind in ("plain", "entropy", "sum", "grpo"):
        gain, entropy_gain = problem.upstream(kind)
        loss = (log_probs * gain).sum() + (0 if entropy_gain is None else (entropy * entropy_gain).sum())
        want = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
        found = truth.gradients(kind)
        torch.testing.assert_close(found[0], want[0][truth.rows])
        torch.testing.assert_close(found[1], want[1][truth.columns])
    is_target = torch.isin(truth.columns, problem.targets)
    assert not is_target[truth.other].any()


def test_errors_see_a_wrong_row_and_a_nan() -> None:
    problem = Problem(TINY, CPU)
    log_probs = problem.truth.log_probs.clone()
    log_probs[0] += 1.0
    found = problem.truth.errors(Outputs(log_probs), None, None)
    assert found == {"log_prob": pytest.approx(1.0), "log_prob_all": pytest.approx(1.0)}
    log_probs[0] = float("nan")
    found = problem.truth.errors(Outputs(log_probs), None, None)
    assert found["log_prob"] is None
    assert not is_valid({"errors": found})


def test_table_lets_a_remark_run_over() -> None:
    rows = [["a", "1.000", "2", "3"], ["longer", "-", "out of memory"]]
    assert report.table(("row", "ms", "x", "y"), rows) == [
        "row        ms  x  y",
        "a       1.000  2  3",
        "longer  -  out of memory",
    ]


def test_problem_holds_its_floor_and_leaves() -> None:
    problem = Problem(TINY, CPU)
    problem.product()
    want = problem.hidden.detach() @ problem.weight.detach().t()
    torch.testing.assert_close(problem.logits, want)
    problem.hidden.grad = torch.ones_like(problem.hidden)
    problem.clear()
    assert problem.hidden.grad is None
    assert problem.main_grad.dtype == torch.float32


def test_select_rivals_by_default_only_where_they_fit() -> None:
    def names(device: str, **options: Any) -> set[str]:
        arguments = SimpleNamespace(
            **{"quick": False, "trace": False, "rivals": None, "workspace": None} | options
        )
        found = bench.select_contenders(["linear_logp"], arguments, torch.device(device), [])
        return {row.operator for row in found}

    assert names("cuda") == {"linear_logp", "rival"}
    assert names("cuda", quick=True) == names("cpu") == {"linear_logp"}
    assert names("cuda", quick=True, rivals="native") == {"linear_logp", "rival"}
