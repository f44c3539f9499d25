"""Tests --rm-type code: programs that pass, fail, cheat and misbehave, each in a real sandbox."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace

import pytest

from slime.rollout.rewards import async_rm, batched_async_rm, unit_tests
from slime.rollout.rewards.labels import LabelCheck
from slime.rollout.rewards.unit_tests import extract_program
from slime.types import Sample

ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
PAIRS = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}
GOOD = "def add(a, b):\n    return a + b"
READS = "a, b = map(int, input().split())\nprint(a + b)"


def fenced(program):
    return f"Think.\n```python\nx = 1\n```\nThen:\n```python\n{program}\n```\nDone.<|im_end|>"


def score(program, label, rm_type="code"):
    sample = Sample(response=fenced(program), label=label)
    return asyncio.run(async_rm(Namespace(rm_type=rm_type), sample))


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (GOOD, 1.0),
        (GOOD.replace("+", "-"), 0.0),
        ("def add(a, b:", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        (GOOD + "\nif __name__ == '__main__':\n    raise SystemExit(1)", 1.0),
        (GOOD + "\nprint('noise')", 1.0),
    ],
)
def test_statements_decide(program, reward):
    assert score(program, ASSERTS) == reward


@pytest.mark.parametrize(
    ("program", "reward"), [(READS, 1.0), ("print(3)", 0.0), (READS + "\nraise ValueError", 0.0), ("", 0.0)]
)
def test_what_the_program_prints_decides(program, reward):
    assert score(program, PAIRS) == reward


@pytest.mark.parametrize(
    ("label", "right"), [("\n".join(ASSERTS), GOOD), (json.dumps(PAIRS), READS)], ids=["statements", "pairs"]
)
def test_a_label_may_be_text(label, right):
    assert (score(right, label), score("print(3)", label)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = []\nwhile True: x.append(bytearray(1 << 22))",
        "import os\nwhile True: os.fork()",
        "while True: print('a' * 1000)",
        "import socket; socket.create_connection(('192.0.2.1', 80), 0.5)\n" + GOOD,
    ],
)
def test_a_program_that_misbehaves_gets_nothing(program, monkeypatch):
    monkeypatch.setattr(unit_tests, "TIME_S", 2.0)
    assert score(program, ASSERTS) == 0.0


def test_a_batch_is_scored_at_once_in_order():
    samples = [Sample(response=fenced(p), label=ASSERTS) for p in (GOOD, "pass", GOOD, "pass")]
    assert asyncio.run(batched_async_rm(Namespace(rm_type="code"), samples)) == [1.0, 0.0, 1.0, 0.0]


def test_the_last_block_is_the_program():
    assert extract_program("```py\na\n```\n```\nb\n```") == "b\n"
    assert extract_program("c = 1") == "c = 1"


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (None, "must hold tests"),
        ("", "must hold tests"),
        ([], "must hold tests"),
        (["assert f("], "must be Python"),
        ({"inputs": ["1"]}, "as many inputs as outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "all texts"),
    ],
)
def test_a_label_without_tests_is_refused(label, said):
    with pytest.raises(ValueError, match=said):
        LabelCheck("code")(label, {})
    with pytest.raises(ValueError, match=said):
        score(GOOD, label)
