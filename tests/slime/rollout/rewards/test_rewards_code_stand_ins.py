"""Tests --rm-type code: the operations of statements on a program that runs in another process."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import yaml

from slime.rollout.rewards.tested.answer import ProgramPeer
from slime.rollout.rewards.tested.tester import run_tests

CASES = yaml.safe_load(Path(__file__).with_name("honest_programs.yaml").read_text())


def outcome(program, tests):
    """Returns "passed", or the name of the error that the first failing statement raised."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=ProgramPeer(theirs, program).serve)
        thread.start()
        try:
            run_tests(ours, [tests])
            return "passed"
        except Exception as error:  # This is the border to the tested program.
            return type(error).__name__
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("case", CASES)
def test_an_honest_program_passes(case):
    assert outcome(CASES[case]["program"], CASES[case]["tests"]) == "passed"


@pytest.mark.parametrize(
    ("program", "test", "error"),
    [
        ("def f(): return 3", "assert f() == 4", "AssertionError"),
        ("def f(): return 1 / 0", "f()", "ZeroDivisionError"),
        ("def f(): return 3", "assert g() == 3", "NameError"),
        ("class A: pass", "assert A().x == 3", "AttributeError"),
        ("class A: pass", "assert A() < 3", "TypeError"),
        ("def f(x): x.append(1)", "x = []\nf(x)\nassert x == []", "AssertionError"),
        ("def f(g): g()", "def fails(): raise KeyError('mine')\nf(fails)", "KeyError"),
        ("class A:\n    __eq__ = lambda s, o: True", "assert A() == 3", "AssertionError"),
        ("def f(call): return call.__globals__", "f(lambda: 1)", "TypeError"),
        ("def f(o): return o._hidden", "class O: _hidden = 1\nf(O())", "TypeError"),
        (
            "def f(o): return o.__class__.__init__",
            "class O: pass\nassert f(O()) is O.__init__",
            "AssertionError",
        ),
    ],
)
def test_a_wrong_program_fails(program, test, error):
    assert outcome(program, test) == error


SWALLOWS = """class f:
    def __init__(s, *words): pass
    def __enter__(s): return s.made()
    def __exit__(s, *words): return True
"""
ODD = "class Odd(int):\n    def __int__(s): raise ValueError\n"


@pytest.mark.parametrize(
    ("program", "test", "error"),
    [
        (
            "def f(x): raise StopIteration",
            "for got, want in zip(map(f, [1]), [4]): assert got == want",
            "RuntimeError",
        ),
        (
            "class End(StopIteration): pass\ndef f(x): raise End",
            "assert list(map(f, [1])) == []",
            "RuntimeError",
        ),
        (
            "class f:\n    def __len__(s): raise StopIteration",
            "assert list(map(len, [f()])) == []",
            "RuntimeError",
        ),
        (f"{SWALLOWS}    def made(s): return 7", "with f() as x: assert x == 3", "AssertionError"),
        (f"{ODD}{SWALLOWS}    def made(s): return Odd(7)", "with f() as x: assert x == 3", "ValueError"),
        ("Wrong = Exception\ndef f(): return 7", "try: assert f() == 3\nexcept Wrong: pass", "TypeError"),
        (
            "Wrong = (ValueError, AssertionError)\ndef f(): return 7",
            "try: assert f() == 3\nexcept Wrong: pass",
            "TypeError",
        ),
    ],
    ids=["map", "subclass", "operation", "exit", "exit of an operation", "class", "classes"],
)
def test_no_error_of_the_program_hides_a_failed_test(program, test, error):
    assert outcome(program, test) == error


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "def f(): yield 1",
            "n = f()\nassert n.__next__() == 1\ntry: n.__next__()\nexcept StopIteration: n = None\nassert n is None",
        ),
        (
            "def f():\n    got = yield 1\n    return got",
            "n = f()\nnext(n)\ntry: n.send(5)\nexcept StopIteration: n = 5\nassert n == 5",
        ),
        (
            f"{SWALLOWS}    def made(s): return s\n    def g(s): raise KeyError",
            "with f() as x: x.g()\nwith f(): raise ValueError",
        ),
    ],
    ids=["next", "send", "exit"],
)
def test_an_honest_end_is_an_end(program, test):
    assert outcome(program, test) == "passed"
