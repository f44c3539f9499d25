"""The `code` reward runs the response's Python program in a sandbox against the label's tests.

A label has one of two kinds. Statements (a text, or a list of texts) run in a second sandbox and must raise no error;
there, the names of the program call the program in the first sandbox. {"inputs": [...], "outputs": [...]} starts the
program once per input and compares its output. Tests and expected outputs never enter the program's sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import logging
import os
import re
import socket
from collections.abc import Iterator

from slime.agent.sandbox import Limits, LocalSandbox, SandboxError
from slime.config.schema import Config
from slime.event_loop import loop_objects
from slime.rollout.rewards.tested.answer import PROGRAM
from slime.rollout.rewards.tested.tester import PASSED, TESTS
from slime.rollout.rewards.text import without_special_text
from slime.types import Metadata, Sample

logger = logging.getLogger(__name__)

Pairs = tuple[tuple[str, str], ...]
TIME_S = 10.0
"""Limit on the wall-clock time in seconds, for all statements together and for every single input."""
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
_RUN = "exec {python} -c 'import sys; sys.path.insert(0, \".\"); from tested.{name} import main; main()'"
_PARTS = ("__init__", "wire", "peer")


async def code_reward(c: Config, sample: Sample) -> float:
    """Returns 1.0 if the program of the response passes every test of the label, else 0.0.

    The program is the last fenced block of Python, or the whole response without such a block. Raises ValueError for a
    label without tests, and SandboxError if no sandbox starts. One program per CPU core runs at a time. If the sandbox
    fails while the program runs, the program runs once more; a program whose sandbox fails twice gets 0.0.
    """
    tests = parse_tests(sample.label, sample.metadata if isinstance(sample.metadata, dict) else {})
    program = extract_program(sample.response)
    if not program.strip():
        return 0.0
    slots = loop_objects().semaphore(code_reward, os.cpu_count() or 1)
    hide = tuple(_named_paths(c))
    async with slots:
        for _ in range(2):
            async with LocalSandbox(limits=LIMITS, hide=hide) as sandbox:
                try:
                    if isinstance(tests, list):
                        return float(await _statements(sandbox, program, tests))
                    return float(await _outputs(sandbox, program, tests))
                except (SandboxError, OSError) as error:
                    logger.warning("the sandbox of a program failed while it ran: %s", error)
    return 0.0


async def _outputs(sandbox: LocalSandbox, program: str, pairs: Pairs) -> bool:
    for inputs, expected in pairs:
        # The file is written again for every input, because the program may have changed it.
        await sandbox.write_file(PROGRAM, program)
        result = await sandbox.exec(f"{_PYTHON} {PROGRAM}", stdin=inputs, timeout=TIME_S)
        if result.exit_code or not _same(result.stdout, expected):
            return False
    return True


async def _statements(sandbox: LocalSandbox, program: str, tests: list[str]) -> bool:
    """Runs the tests in a second sandbox, which the program reaches only through calls of the tests."""
    async with LocalSandbox(limits=LIMITS) as judge:
        await sandbox.write_file(PROGRAM, program)
        await judge.write_file(TESTS, json.dumps(tests))
        for box, name in ((sandbox, "answer"), (judge, "tester")):
            for part in (*_PARTS, name):
                await box.write_file(f"tested/{part}.py", _source(part))
        theirs, ours = socket.socketpair()
        run = {name: _RUN.format(python=_PYTHON, name=name) for name in ("answer", "tester")}
        answer = asyncio.ensure_future(sandbox.exec(run["answer"], stdin=theirs, timeout=TIME_S))
        try:
            result = await judge.exec(run["tester"], stdin=ours, timeout=TIME_S)
        finally:
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError, OSError):
                await answer
        return result.exit_code == 0 and result.stdout == PASSED


def _source(part: str) -> str:
    return importlib.resources.files("slime.rollout.rewards.tested").joinpath(f"{part}.py").read_text("utf-8")


def _named_paths(c: Config) -> Iterator[str]:
    """Yields the prompt files, checkpoints and logs in the run's flags. A sandbox can read only a few folders of the
    host, but such a file may be in a system folder."""
    sections = (c.data, c.evaluation, c.checkpoint, c.critic, c.distillation, c.lora, c.logging, c.debug)
    for value in (value for section in sections for value in vars(section).values()):
        for text in value if isinstance(value, list | tuple) else (value,):
            # A prompt file may have a slice of its rows at its end.
            path = text.partition("@[")[0] if isinstance(text, str) else ""
            if path.count("/") > 1 and path.startswith("/"):
                yield path


def extract_program(response: str) -> str:
    """Returns the last fenced block of Python in the response, or the whole response."""
    text = without_special_text(response)
    found = _FENCE.findall(text)
    return str(found[-1]) if found else text


def parse_tests(label: object, metadata: Metadata) -> list[str] | Pairs:
    """Returns statements, or inputs with their outputs. Raises ValueError if the label is neither or has a syntax
    error."""
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
    """Returns `values` if it is a list of texts, else []."""
    texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    return texts if isinstance(values, list) and len(texts) == len(values) else []


def _same(printed: str, expected: str) -> bool:
    """Returns True if all lines are equal. Spaces at the end of a line and empty lines at the end are ignored."""
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return ours == theirs
