"""Tests the benchmark: its command line on tiny shapes, and its arithmetic on known timings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import rows_of, run
from operator_bench import command as bench
from operator_bench import rivals
from operator_bench.linear import timed
from operator_bench.own import own_contenders
from operator_bench.pairs import unfit
from operator_bench.problem import Contender, Outputs, Problem
from operator_bench.timing import CallTimes, calls_within, reason_of, take_turns

from rl_kernel.ops.linear_logp.cases import LinearCase

CPU = torch.device("cpu")
TINY = LinearCase("tiny", 37, 16, 101)
INF = float("inf")


def test_linear_operators_and_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "linear_logp", "linear_token_loss", "--cases", "tiny", "--rivals", "torch,native")
    printed = capsys.readouterr().out
    (case,) = result["linear"]
    assert case["case"] == {"name": "tiny", "tokens": 37, "hidden": 16, "vocab": 101}
    assert case["floor_ms"] == pytest.approx(3 * case["product_ms"]["median"], rel=1e-3)
    rows = rows_of(case)
    assert {"linear_logp 512MiB bf16", "torch fp32", "native +entropy grad"} <= rows.keys()
    for name, row in rows.items():
        assert name in printed
        assert "skipped" not in row, (name, row["skipped"])
        ratio = row["ms"]["median"] / (row["products"] * case["product_ms"]["median"])
        assert row["ratio"] == pytest.approx(ratio, rel=1e-2)
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["ms"]["calls"] == result["rounds"]
        assert unfit(row) is None, (name, row["errors"])
        assert row["operator"] == "rival" or set(row["implementation"].values()) == {"reference"}
    assert rows["linear_logp unlimited fp32"]["errors"]["log_prob"] < 1e-5
    assert rows["linear_logp unlimited bf16"]["errors"]["log_prob"] > 1e-5
    assert "entropy" in rows["native +entropy"]["errors"]
    assert "d_hidden" not in rows["linear_logp forward bf16"]["errors"]


def test_operators_that_move_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operators = "logp", "ratio_kl", "grpo_loss", "swiglu", "rotary", "masked", "group_advantage"
    result = run(tmp_path, *operators, "--commit", "abc")
    machine = result["machine"]
    assert machine["command"].startswith("python -m vime bench op logp ratio_kl")
    assert machine["command"].endswith("--commit abc --device cpu --out result.json"), (
        "no folder of the machine"
    )
    assert (machine["commit"], machine["dirty"], machine["torch"]) == ("abc", None, torch.__version__)
    assert {"date", "gpu", "gpu_facts", "cuda", "triton", "liger-kernel", "cut-cross-entropy"} <= set(machine)
    assert result["linear"] == []
    rows = rows_of(result["elementwise"])
    for name, row in rows.items():
        assert "skipped" not in row, (name, row.get("skipped"))
        # The results of a layer's operators are rounded to bfloat16, two or three times.
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
    assert {row["operator"] for row in rows.values()} > {*operators, "masked_whiten"} - {"masked"}
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
    line = "linear_logp", "--device", "cpu", "--cases", "tiny", "--rows", "forward fp32,cce exact"
    assert bench.main([*line, "--rivals", "cce", "--trace"]) == 0
    printed = capsys.readouterr().out
    assert "tiny: linear_logp forward fp32" in printed and "aten::" in printed
    assert "tiny: cce exact: not importable (No module named 'cut_cross_entropy')" in printed


def test_workspaces_replace_the_standard_ones() -> None:
    names = {row.name for row in own_contenders(["linear_logp", "linear_token_loss"], [64.0, INF])}
    assert {"linear_logp unlimited bf16", "linear_token_loss 64MiB bf16 .grad"} <= names
    assert not any("512" in name or "1.5GiB" in name for name in names)


class FakeClock:
    """A clock whose time passes only when a test advances it."""

    fill_ms = 7.0

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
        calls={"a": 5, "b": 3},
    )
    assert timings.contenders == {"a": CallTimes((7.0,) * 5), "b": CallTimes((3.0,) * 3)}
    assert timings.yardstick.ms == (2.0,) * 8
    assert len(resets) == 8 + 5
    assert timed(CallTimes((2.0, 2.2, 3.0)), 1, 2.0) == {
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
    id_log_probs = log_p.gather(1, problem.ids.long())
    for kind in ("plain", "entropy", "grpo", "ids"):
        outputs = zip((log_probs, entropy, id_log_probs), problem.upstream(kind), strict=True)
        loss = sum((out * gain).sum() for out, gain in outputs if gain is not None)
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
    assert unfit({"errors": found}) == "its results are off: log_prob not finite, allowed 0.05"


def test_select_rivals_by_default_only_where_they_fit() -> None:
    def names(device: str, **options: Any) -> set[str]:
        standard = {"quick": False, "trace": False, "rivals": None, "workspace": None}
        arguments = SimpleNamespace(losses=None, **standard | options)
        found = bench.select_contenders(["linear_logp"], arguments, torch.device(device), [])
        return {row.operator for row in found}

    assert names("cuda") == {"linear_logp", "rival"}
    assert names("cuda", quick=True) == names("cpu") == {"linear_logp"}
    assert names("cuda", quick=True, rivals="native") == {"linear_logp", "rival"}
