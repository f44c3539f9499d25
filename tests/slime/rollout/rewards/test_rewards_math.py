"""Tests mathematical equality through math-verify, in processes that no answer can block."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from slime.rollout.rewards import async_rm, math_equal, math_processes
from slime.rollout.rewards.math_equal import same_answer
from slime.rollout.rewards.math_processes import MathChecker
from slime.types import Sample

TOWER = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker(workers=1, cpu_limit_s=1)
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\frac12", "1/2"),
        ("0.5", r"\frac{1}{2}"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("2,1", r"\{1,2\}"),
        ("5", "x=5"),
        ("$5$", "5"),
        ("0.333333", r"\frac{1}{3}"),
        (r"\pi/2", r"\frac{\pi}{2}"),
        (r"18\text{ dollars}", "18"),
        (r"\text{(A)}", "A"),
        (r"50\%", r"\frac{1}{2}"),
        (r"\dfrac{3}{4}", "3/4"),
        (r"\text{north east}", "north east"),
        (r"\frac{-3}{4}", r"-\frac34"),
        (r"25\text{ cm}^2", "25"),
        (r"30^{\circ}", "30"),
        (r"\left[2, \infty\right)", r"[2,\infty)"),
        (r"\frac{7}{3}", r"2\frac{1}{3}"),
    ],
)
def test_same(answer, gold):
    assert same_answer(answer, gold) is True


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("(2,1)", "(1,2)"),
        ("34 or 35", "34"),
        ("1,2,3", "3"),
        ("12.6", "12.5"),
        ("x", "y"),
        ("Tuesday", "Monday"),
        (r"2} \boxed{3", "2"),
        ("", "5"),
        (r"\frac{1}{", "1"),
        (r"\frac{2}{4}", r"\frac{1}{2}"),  # slime requires reduced fractions too
        (r"\frac24", "1/2"),
        ("[1,2]", "(1,2)"),
        ("1,2", "(1,2)"),
        (r"(2,\infty)", r"[2,\infty)"),
        (r"\sqrt{16}", "4"),  # a whole number must be computed
        ("6*2", "12"),
        (r"3 \times 10^2", "300"),
        ("256", "2^8"),
    ],
)
def test_different(answer, gold):
    assert same_answer(answer, gold) is False


def test_plain_numbers_and_equal_text_need_no_process(monkeypatch):
    monkeypatch.setattr(math_equal, "_ask", lambda *_: pytest.fail("asked math-verify"))
    assert same_answer("18", "18") and same_answer("18.0", "$18") and same_answer("1,000", "1000")
    assert same_answer(r"\frac{1}{2}", r" \frac{1}{2} ")
    assert not same_answer("18", "19") and not same_answer("9" * 5000, "8" * 5000)


def test_pathological_answer_is_bounded(checker, caplog):
    start = time.monotonic()
    assert checker.equal("7", r"2^{2^{2^{2^{2^2}}}}") is False
    assert time.monotonic() - start < 20
    assert "takes more than 1 s of CPU time" in caplog.text
    assert checker.equal("1/2", "0.5") is True  # the next comparison works


def test_event_loop_keeps_running_while_a_tower_is_scored(monkeypatch, checker):
    monkeypatch.setattr(math_equal, "_checker", lambda: checker)
    math_equal._ask.cache_clear()
    args = SimpleNamespace(rm_type="math", custom_rm_path=None)
    tower = Sample(index=0, response=rf"\boxed{{{TOWER}}}", label=r"\sqrt{7}")
    easy = Sample(index=1, response=r"\boxed{7}", label="7")

    async def scenario() -> tuple[float, int]:
        slow = asyncio.create_task(async_rm(args, tower))
        assert await async_rm(args, easy) == 1.0
        beats = 0
        while not slow.done():
            await asyncio.sleep(0.02)
            beats += 1
        return await slow, beats

    value, beats = asyncio.run(scenario())
    assert value == 0.0
    assert beats >= 20  # at least a second of CPU time in ticks of 20 ms, with a margin for a loaded machine


def test_calls_from_many_threads_share_the_workers():
    checker = MathChecker(workers=2, cpu_limit_s=5)
    results: dict[int, bool] = {}

    def compare(i: int) -> None:
        results[i] = checker.equal(f"\\frac{{{i}}}{{2}}", f"0.5 \\cdot {i if i % 2 else i + 1}")

    threads = [threading.Thread(target=compare, args=(i,)) for i in range(1, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: i % 2 == 1 for i in range(1, 21)}
    assert len(checker._idle) <= 2
    checker.close()


def test_stopped_worker_is_replaced_after_the_wall_limit(caplog):
    checker = MathChecker(workers=1, wall_limit_s=60.0)
    assert checker.equal("1/2", "0.5") is True
    checker.wall_limit_s = 0.3
    stopped = checker._idle[0].process
    os.kill(stopped.pid, signal.SIGSTOP)
    assert checker.equal("1/3", "0.5") is False
    assert "too little CPU time" in caplog.text and stopped.poll() is not None
    checker.wall_limit_s = 60.0
    assert checker.equal("1/4", "0.25") is True
    checker.close()


def test_worker_killed_from_outside_does_not_cost_a_right_answer():
    checker = MathChecker(workers=1)
    assert checker.equal("1/2", "0.5") is True
    process = checker._idle[0].process
    os.kill(process.pid, signal.SIGSTOP)  # the request is in progress when the kill comes
    timer = threading.Timer(0.1, process.kill)
    timer.start()
    assert checker.equal("1/4", "0.25") is True
    timer.join()
    idle = checker._idle[0].process
    idle.kill()
    idle.wait()
    assert checker.equal("1/8", "0.125") is True
    checker.close()
    assert checker._idle == []


def test_worker_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(math_processes.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"did not start \(exit code 1, .* is math-verify installed"):
        MathChecker(workers=1).equal("1/2", "0.5")
