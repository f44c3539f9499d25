"""No code reads meaning from the text of an error of this project: an error has fields (`slime/records/errors.py`)."""

from __future__ import annotations

import ast

import pytest
from error_texts import readers
from house_tree import package_files, parse

FOREIGN = {
    "slime/checkpoints/hub.py:local_checkpoint": "shows the first line of an error of huggingface_hub",
    "slime/cluster/ray_start.py:_start": "Ray raises a plain Exception when its start took too long",
    "slime/data/files.py:_csv_lines": "cuts advice for programmers from an error of Python's csv",
    "slime/system/disk_space.py:_reason": "libraries replace an OSError by their own error without its number",
    "slime/environments/worker.py:one_line": "shows an error of an environment in one line",
    "slime/hooks.py:_near_import": "Python 3.11 stores the missing name of an ImportError in its text alone",
    "slime/megatron_backend/checkpoint/checkpoint_io.py:_cause": "shows the first line of an error of torch",
    "slime/megatron_backend/step/out_of_memory.py:explained": "NCCL's error of a full device has torch's general class",
    "slime/megatron_backend/step/out_of_memory.py:missing_bytes": "torch has the missing bytes in the text alone",
    "slime/records/once.py:warn_once": "the text is the key of a set; nothing is read from it",
    "slime/user_code.py:find_location_in": "a traceback of another process comes from Ray as a text",
    "slime/user_code.py:remedy": "Python raises a plain ValueError for signals outside the main thread",
    "slime/user_code.py:add_location": "adds the place in the user's code unless the user's error has it",
    "vime/memory/failure.py:_may_come_from_memory": "CUDA, NCCL and the system report a lack of memory as a text",
    "vime/pool/engine_flags.py:_typed": "argparse puts the name of the argument before its message",
    "vime/sglang_api/request.py:_named": "msgspec has the field and the type in the text alone",
    "vime/vllm/worker/weight_views.py:find": "shows the first line of an error of torch",
    "vime/vllm/worker/shared_gpu.py:allow_other_memory_use": "vLLM raises a plain AssertionError",
}
"""Readers of the errors of other programs, reviewed: path:function -> the reason."""


def test_no_code_reads_the_text_of_an_error() -> None:
    found = readers({str(path): parse(path) for path in package_files()})
    unknown = [f"{reader.name}: {reader.code}" for reader in found if reader.name not in FOREIGN]
    assert not unknown, "read a field of the error (slime/records/errors.py), not its text:\n" + "\n".join(
        unknown
    )
    assert set(FOREIGN) == {reader.name for reader in found}, "remove exceptions that nothing needs"


@pytest.mark.parametrize(
    "body",
    [
        "if 'context length' in str(error): pass",
        "if str(error) == 'x': pass",
        "if error.args[0] != 'x': pass",
        "str(error).startswith('reward ')",
        "f'{error}'.partition('; ')",
        "import re; re.search('x', str(error))",
        "PATTERN.findall(f'got {error!r}')",
        "text = str(error); text.replace('--vllm-', '')",
        "text, more = str(error), 1; text.lower().split()",
        "for text in getattr(error, 'problems', [str(error)]): PATTERN.findall(text)",
        "if (text := str(error.__cause__)) and 'x' in text: pass",
        "'; '.join([str(error)]).rpartition('; ')",
        "in_own_flags(str(error))",
        "in_own_flags(more=1, text=str(error))",
        "of_error(error)",
        "for one in causes(error): str(one).count('x')",
    ],
)
def test_readers_are_found(body: str) -> None:
    code = f"""
def in_own_flags(text, more=0):
    return text.replace("a", "b")
def of_error(error):
    return in_own_flags(str(error))
def causes(error) -> Iterator[BaseException]: ...
def f():
    try: g()
    except ValueError as error:
        {body}
"""
    assert readers({"a.py": ast.parse(code)})


@pytest.mark.parametrize(
    "body",
    [
        "print(f'{error}; see the log')",
        "raise RuntimeError(str(error)) from error",
        "if error.flag in known: pass",
        "if isinstance(error, OSError) and error.errno in FULL: pass",
        "str(other).partition('; ')",
        "report(str(error))",
    ],
)
def test_texts_may_be_shown(body: str) -> None:
    code = f"""
def report(text):
    print(text.strip())
def f(other):
    try: g()
    except ValueError as error:
        {body}
"""
    assert not readers({"a.py": ast.parse(code)})
