"""The `code` reward: runs the response's Python program in a sandbox against the label's tests.

A label is one of two kinds. Statements (a text, or a list of texts) run after the program, in the same process, and
must raise nothing. {"inputs": [...], "outputs": [...]} starts the program once per input and compares what it prints.
An expected output never enters the sandbox, so a program cannot find it there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import weakref

from slime.agent.sandbox import Limits, LocalSandbox
from slime.config.schema import Config
from slime.rollout.rewards.text import without_special_text
from slime.types import Metadata, Sample

Pairs = tuple[tuple[str, str], ...]
TIME_S = 10.0
"""Wall-clock time of the statements together, and of each input."""
LIMITS = Limits(
    memory_bytes=1 << 30,
    address_space_bytes=4 << 30,
    processes=32,
    cpu_s=10,
    disk_bytes=64 << 20,
    files=1000,
)
_PYTHON = "python3 -I -B"
_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)
# The word goes out only after the last statement: an early exit is no success.
_RUNNER = """
import json, os, sys
task = json.loads(sys.stdin.buffer.read())
sys.stdin = open(os.devnull)
space = {"__name__": "answer"}
exec(compile(task["program"], "answer.py", "exec"), space)
for test in task["tests"]:
    exec(compile(test, "test.py", "exec"), space)
sys.stdout.flush()
os.write(1, task["word"].encode())
"""
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def code_reward(c: Config, sample: Sample) -> float:
    """1.0 if the program of the response passes every test of the label, else 0.0.

    The program is the last fenced block of Python, without one the whole response. ValueError for a label without
    tests. One sandbox per CPU core runs at a time.
    """
    tests = tests_of(sample.label, sample.metadata if isinstance(sample.metadata, dict) else {})
    program = program_of(sample.response)
    if not program.strip():
        return 0.0
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))
    async with LocalSandbox(limits=LIMITS, slots=slots) as sandbox:
        if isinstance(tests, list):
            return float(await _statements(sandbox, program, tests))
        await sandbox.write_file("answer.py", program)
        for given, expected in tests:
            result = await sandbox.exec(f"{_PYTHON} answer.py", stdin=given, timeout=TIME_S)
            if result.exit_code or not _same(result.stdout, expected):
                return 0.0
    return 1.0


async def _statements(sandbox: LocalSandbox, program: str, tests: list[str]) -> bool:
    word = secrets.token_hex(16)
    await sandbox.write_file("run.py", _RUNNER)
    task = json.dumps({"program": program, "tests": tests, "word": word})
    result = await sandbox.exec(f"{_PYTHON} run.py", stdin=task, timeout=TIME_S)
    return result.exit_code == 0 and result.stdout.endswith(word)


def program_of(response: str) -> str:
    """The last fenced block of Python in the response, or the whole response."""
    text = without_special_text(response)
    found = _FENCE.findall(text)
    return str(found[-1]) if found else text


def tests_of(label: object, metadata: Metadata) -> list[str] | Pairs:
    """Statements, or inputs with their outputs. ValueError if the label is neither or has a syntax error."""
    value = label
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            value = json.loads(label)
        except ValueError:
            value = label
    if isinstance(value, dict):
        return _pairs(value, label)
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) and t.strip() for t in tests):
        raise ValueError(
            f"label must hold tests for --rm-type code, got {label!r:.80}; give Python statements, or an object "
            "with inputs and outputs"
        )
    for test in tests:
        try:
            compile(test, "label", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(
                f"label must be Python for --rm-type code, got {test!r:.80}: {error}; mend the test"
            ) from error
    return tests


def _pairs(value: dict[object, object], label: object) -> Pairs:
    inputs, outputs = _texts(value.get("inputs")), _texts(value.get("outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"label must have as many inputs as outputs, all texts, for --rm-type code, got {label!r:.80}; "
            "give lists of the same length"
        )
    return tuple(zip(inputs, outputs, strict=True))


def _texts(values: object) -> list[str]:
    """[] unless it is a list of texts."""
    texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    return texts if isinstance(values, list) and len(texts) == len(values) else []


def _same(printed: str, expected: str) -> bool:
    """Equal lines; spaces at the end of a line and empty lines at the end do not count."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return ours == theirs
