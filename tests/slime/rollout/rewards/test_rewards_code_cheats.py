"""Tests --rm-type code: programs that pass no test and try to get a reward."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace

import pytest
from sandbox_cases import namespaces_work

from slime.agent.sandbox import LocalSandbox, SandboxError
from slime.rollout.rewards import async_rm, unit_tests
from slime.types import Sample

ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
PAIRS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
GOOD = "def add(a, b):\n    return a + b"
READS = "a, b = map(int, input().split())\nprint(a + b)"
EVERYTHING = """
class Anything:
    def __getattr__(self, name): return lambda *words: True
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
    __hash__ = lambda self: 3
    __bool__ = lambda self: True
    __sub__ = __rsub__ = __add__ = __radd__ = lambda self, other: 0.0
    __abs__ = __float__ = lambda self: 0.0
    __round__ = lambda self, *digits: 0
    def __iter__(self): return iter([])
class Zero(float): pass
class Mixed(Anything):
    __sub__ = __rsub__ = lambda self, other: Zero(0.0)
class Itself(Anything):
    __sub__ = __rsub__ = lambda self, other: self
class math:
    isclose = staticmethod(lambda *words, **named: True)
abs = round = lambda *words: 0
sorted = len = lambda *words: Anything()
all = isinstance = lambda *words: True
import builtins
builtins.abs, builtins.AssertionError = abs, type("Other", (BaseException,), {})
def anything(*words): return Anything()
def mixed(*words): return Mixed()
def itself(*words): return Itself()
class Number(float):
    __eq__, __sub__, __hash__ = Anything.__eq__, Anything.__sub__, Anything.__hash__
def number(*words): return Number(7)
def clear(values): values.clear(); return values
def climb(call): return call.__globals__["expected"]
def frames(call):
    import sys
    frame = sys._getframe()
    while frame:
        if "expected" in frame.f_globals: return frame.f_globals["expected"]
        frame = frame.f_back
def leave(call): return call(3).gi_frame.f_globals["expected"]
"""
UNEARNED = [
    *("anything() == 3", "3 == anything()", "not anything() != 3", "anything() in (3, 4)", "3 in anything()"),
    *(
        "3 in [anything()]",
        "anything() < 10",
        "10 > anything()",
        "[anything()] == [3]",
        "{'a': anything()} == {'a': 3}",
    ),
    *(
        "abs(anything() - 1.5) < 1e-6",
        "abs(1.5 - anything()) < 1e-6",
        "abs(itself() - 1.5) < 1e-6",
        "mixed() - 1.5 == 0",
    ),
    *(
        "round(mixed() - 1.5, 7) == 0",
        "math.isclose(number(), 1.5)",
        "abs(number() - 1.5) < 1e-6",
        "number() == 3",
    ),
    *(
        "sorted(anything()) == [3]",
        "len(clear([1])) == 1",
        "isinstance(anything(), int)",
        "all([anything() == 3])",
    ),
    *("anything() == {'a': 1}", "anything() is None", "type(anything()) is int", "clear([1]) == expected"),
    *(
        "climb(lambda: 1) == expected",
        "frames(lambda: 1) == expected",
        "leave(lambda n: (n for n in [1])) == expected",
    ),
]


def score(program, label):
    sample = Sample(response=f"```python\n{program}\n```", label=label)
    return asyncio.run(async_rm(Namespace(rm_type="code"), sample))


def test_no_object_of_the_program_decides_a_comparison():
    """One program tries every cheat. The label collects its successes, so that one run is enough."""
    label = ["expected = [5]\nwon = []"]
    for test in UNEARNED:
        label.append(
            f"try:\n    if {test}: won.append({test!r})\nexcept (TypeError, AttributeError, KeyError): pass"
        )
    assert score(EVERYTHING, [*label, "assert won == []"]) == 1.0
    assert score(EVERYTHING, [*label, "assert won != []"]) == 0.0


PROCESS = """
import glob, os, sys
def seek():
    for name in sum((glob.glob(f"/proc/*/{kind}") for kind in ("fd/*", "environ", "cmdline", "maps")), []):
        try: yield open(name, errors="replace").read(1 << 16)
        except OSError: pass
text = "".join(seek())
print(text)
import gc
for found in gc.get_objects():
    if isinstance(found, dict) and isinstance(found.get("tests"), list): found["tests"].clear()
    if isinstance(found, list) and found and isinstance(found[0], str) and "assert" in found[0]: found.clear()
"""
FORGED = """
import json, os
reply = json.dumps({"value": 3, "table": []}).encode()
for descriptor in range(10):
    for data in (b"all tests passed", (len(reply).to_bytes(8, "big") + reply) * 5):
        try: os.write(descriptor, data)
        except OSError: pass
"""
NESTED = """
import os
data = b"[" * 200000
for descriptor in range(3, 10):
    try: os.write(descriptor, len(data).to_bytes(8, "big") + data)
    except OSError: pass
"""
WRONG = "\ndef add(a, b): return 7"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(PROCESS + WRONG, id="searches its process and others"),
        pytest.param(FORGED + WRONG, id="forges answers"),
        pytest.param(FORGED + "os._exit(0)", id="prints the verdict and exits", marks=pytest.mark.slow),
        pytest.param(
            "import atexit, os\natexit.register(os.write, 1, b'all tests passed')" + WRONG, id="atexit"
        ),
        pytest.param("def add(a, b): raise SystemExit(0)", id="exits in a call"),
        pytest.param(
            "import builtins\nbuiltins.exec = builtins.compile = lambda *w: None" + WRONG, id="replaces exec"
        ),
        pytest.param(NESTED + WRONG, id="sends deep JSON"),
        pytest.param(
            "import resource\nresource.prlimit(1, 7, (4, 4))" + WRONG,
            id="limits its owner",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import os\nfor fd in range(100):\n    try: os.close(fd)\n    except OSError: pass" + WRONG,
            id="closes all",
        ),
    ],
)
def test_a_program_that_cheats_gets_nothing(program):
    assert score(program, ASSERTS) == 0.0


def test_a_program_that_ends_fails_a_statement_that_expects_any_error():
    expects = "try:\n    add(1, 2)\nexcept BaseException:\n    pass\nelse:\n    assert False"
    assert score("import os\ndef add(a, b): os._exit(0)", [expects]) == 0.0
    assert score("def add(a, b): raise ValueError", [expects]) == 1.0


@pytest.mark.parametrize("kind", [ASSERTS, PAIRS], ids=["statements", "pairs"])
def test_the_prompt_file_is_hidden(kind, tmp_path):
    if not namespaces_work():
        pytest.skip("this host refuses namespaces to a sandbox, so files that all may read are in view")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o755)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"label": "3"}))
    prompts.chmod(0o644)
    steal = f"import json\nlabel = int(json.load(open({str(prompts)!r}))['label'])\n"
    program = f"{steal}print(label)\ndef add(a, b): return label if a == 1 else 0"
    assert score(program, kind) == 0.0
    assert score(program.replace(steal, "label = 3\n"), kind) == 1.0


def test_a_sandbox_that_fails_is_tried_once_more_and_then_gives_nothing(monkeypatch, caplog):
    """The test kills the owner in the first runs, as the out-of-memory killer does."""
    kept, left = LocalSandbox.exec, [1]

    async def killed(self, cmd, **words):
        if left[0] > 0:
            left[0] -= 1
            self._process.kill()
        return await kept(self, cmd, **words)

    monkeypatch.setattr(LocalSandbox, "exec", killed)
    assert score(READS, PAIRS) == 1.0
    left[0] = 2
    assert score(READS, PAIRS) == 0.0
    assert sum("failed while it ran" in record.message for record in caplog.records) == 3


def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch):
    async def start(self):
        raise SandboxError("no room; make some")

    monkeypatch.setattr(LocalSandbox, "start", start)
    with pytest.raises(RuntimeError, match="no room"):
        score(GOOD, ASSERTS)


def test_tests_never_enter_the_programs_sandbox(monkeypatch):
    """The test reads all files and inputs of the program's sandbox."""
    given = []
    exec_of, write = LocalSandbox.exec, LocalSandbox.write_file

    async def seen(self, cmd, **words):
        given.append((self.sandbox_id, repr((cmd, words))))
        return await exec_of(self, cmd, **words)

    async def written(self, path, content, **words):
        given.append((self.sandbox_id, f"{path}: {content}"))
        return await write(self, path, content, **words)

    monkeypatch.setattr(LocalSandbox, "exec", seen)
    monkeypatch.setattr(LocalSandbox, "write_file", written)
    assert score(GOOD, ["assert add(4, 5) == 9"]) == 1.0
    programs = {box for box, text in given if text.startswith(unit_tests.PROGRAM)}
    assert len(programs) == 1 and len({box for box, _ in given}) == 2
    assert not any("== 9" in text for box, text in given if box in programs)
