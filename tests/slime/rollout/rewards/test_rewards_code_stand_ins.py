"""--rm-type code: what statements may do with a program that runs in another process."""

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
    """ "passed", or the name of the error that the first failing statement raised."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=ProgramPeer(theirs, program).serve)
        thread.start()
        try:
            run_tests(ours, [tests])
            return "passed"
        except Exception as error:  # The border to the program that a case tests.
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
