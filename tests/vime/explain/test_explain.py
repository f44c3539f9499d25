"""Tests `vime explain`: messages found by a part, by a whole line with values, and by misspelled words."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vime.cli import main
from vime.explain import sources
from vime.explain.command import SHOWN, search
from vime.explain.messages import ErrorMessage, entries
from vime.explain.sources import FILE

MESSAGES = [
    ErrorMessage("--a-size must be at most --b, got … and …", "Lower it.", "x.py"),
    ErrorMessage("engine … died and was restarted … times", "Look at its log.", "y.py"),
    ErrorMessage("… must be …, got …", "The message says what is expected.", "z.py"),
]


def test_a_line_of_a_log_finds_its_message() -> None:
    line = "vime train: --a-size must be at most --b, got 3 and 2; lower it"
    assert [m.path for m in search(line, MESSAGES)] == ["x.py", "z.py"]
    assert [m.path for m in search("engine 3 died and was restarted 4 times", MESSAGES)] == ["y.py"]


@pytest.mark.parametrize(
    ("words", "path"),
    [("restrated engine", "y.py"), ("a_size", "x.py"), ("b got", "x.py"), ("restart", "y.py")],
)
def test_words_find_a_message(words: str, path: str) -> None:
    assert search(words, MESSAGES)[0].path == path


def test_other_words_find_nothing() -> None:
    assert search("flamingo", MESSAGES) == search("flamingo teapot engine-room", MESSAGES) == []


def test_the_command_prints_a_message_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--bf16", "fp32", "combined"]) == 0
    first = capsys.readouterr().out.splitlines()[:3]
    assert first[0].startswith("--bf16, --fp16 and --fp32 must not be combined")
    assert first[1:] == ["    Keep one of them.", "    raised in slime/rules/validate.py"]


def test_the_command_fails_with_a_line_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "flamingo", "teapot"]) == 1
    said = capsys.readouterr()
    assert said == ("no message fits 'flamingo teapot'; try fewer words, such as a flag\n", "")
    assert main(["explain"]) == 2 and "got none; give a part" in capsys.readouterr().err


def test_every_message_finds_itself() -> None:
    """The query is its own text, with a value for each placeholder. A more general message may come after it."""
    messages = [m for m in entries() if m.constant >= 12]
    assert len(messages) > 400
    lost = [
        m.rule for m in messages if m.rule not in {f.rule for f in search(m.rule.replace("…", "7"), messages)}
    ]
    assert not lost


PAGE = "docs/troubleshooting.md"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("CUDA out of memory", "--vllm-gpu-memory-utilization"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "vime plan"),
        ("RuntimeError: CUDA error: out of memory", "vime plan"),
        ("OSError: [Errno 24] Too many open files: '/dev/null'", "ulimit -n"),
        ("No available memory for the cache blocks", "Raise --vllm-gpu-memory-utilization"),
        ("Bus error (core dumped)", "--shm-size"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/iter_0000002'", "--save"),
        ("disk full", "--save"),
        ("Address already in use", "--vllm-router-port"),
        ("learning rate nan", "--lr"),
        ("blocks all other samples", "asyncio.to_thread"),
        ("my agent hangs", "--session-deadline-s"),
        ("agent makes no request", "session.api_key"),
        ("no_request", "session.api_key"),
        ("no_tool_parser", "--vllm-tool-call-parser"),
        ("openai.AuthenticationError: Error code: 401", "session.api_key"),
        ("openai.APIConnectionError: Connection error.", "session.base_url"),
        ("openai.PermissionDeniedError: Error code: 403", "--session-max-turns"),
        (
            "the session has ended: turns. the session may have 3 turns, which are used up",
            "--session-max-turns",
        ),
        ("CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"),
        ("rewards stay at 0", "--label-key"),
    ],
)
def test_a_line_of_a_library_finds_its_symptom(line: str, remedy: str) -> None:
    found = search(line, entries())[0]
    assert found.path == PAGE and remedy in found.remedy


def test_every_symptom_of_the_page_finds_itself() -> None:
    """The queries are its whole text, and each part with several words that the page quotes."""
    every = entries()
    symptoms = [m for m in every if m.path == PAGE]
    tables = (sources.ROOT / PAGE).read_text(encoding="utf-8").split("| Symptom |")[1:]
    rows = [row for table in tables for row in table.partition("\n## ")[0].splitlines()]
    of_headers = len(tables)  # the line below each header
    assert len(symptoms) == sum(row.startswith("| ") for row in rows) - of_headers > 20
    for symptom in symptoms:
        for text in (symptom.rule.replace("…", "7"), *(part for part in symptom.quoted if " " in part)):
            assert symptom in search(text.replace("…", "7"), every), text


def code_of(root: Path) -> Path:
    """Makes a checkout with one module and the pages."""
    (root / "vime").mkdir(parents=True)
    (root / "vime/a.py").write_text('raise ValueError(f"--a must be 1, got {x}; raise it")')
    (root / "docs").mkdir()
    (root / sources.NOTES).write_text("")
    (root / sources.SYMPTOMS).write_text(
        "| Symptom | Remedy |\n| --- | --- |\n| `disk full` | Remove files |\n"
    )
    return root


def rules(root: Path) -> set[str]:
    return {m.rule for m in entries(root)}


def test_the_messages_are_read_once_for_each_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a checkout, the first command makes the file and reports it, and a change of any source makes the file
    stale."""
    root = code_of(tmp_path)
    made = "vime explain: reading the messages of the code, once for each change of the code\n"
    assert rules(root) == {"--a must be 1, got …", "disk full"} and capsys.readouterr().err == made
    assert rules(root) == {"--a must be 1, got …", "disk full"} and capsys.readouterr().err == ""
    before = (root / "vime/a.py").stat()
    (root / "vime/a.py").write_text('raise ValueError(f"--b must be 1, got {x}; raise it")')
    os.utime(root / "vime/a.py", ns=(before.st_atime_ns, before.st_mtime_ns))  # the same size and time
    assert "--b must be 1, got …" in rules(root) and capsys.readouterr().err == made
    (root / sources.NOTES).write_text('"--b must be 1" = "Leave it out."')
    assert {m.remedy for m in entries(root)} == {"Leave it out.", "Remove files"}
    (root / sources.SYMPTOMS).write_text("")
    (root / "vime/b.py").write_text('raise RuntimeError("engine died")')
    assert rules(root) == {"--b must be 1, got …", "engine died"}
    (root / "vime/b.py").unlink()
    assert rules(root) == {"--b must be 1, got …"}
    assert sorted(file.name for file in (root / "vime").iterdir()) == ["a.py", FILE.name]


@pytest.mark.parametrize("content", ["", "[", "[]", '{"key": 1}', "\x00"])
def test_a_damaged_file_is_made_again(content: str, tmp_path: Path) -> None:
    root = code_of(tmp_path)
    (root / FILE).write_text(content)
    assert "disk full" in rules(root) and "disk full" in (root / FILE).read_text()


def test_a_folder_that_cannot_be_written_is_read_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = code_of(tmp_path)
    (root / FILE).mkdir()  # even root cannot replace a folder by a file
    for _ in range(2):
        assert "disk full" in rules(root) and "reading the messages" in capsys.readouterr().err
    assert sorted(file.name for file in (root / "vime").iterdir()) == ["a.py", FILE.name]


def test_symptoms_are_found_without_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wheel has the modules and messages.json, and no docs. Without that file the command prints one line."""
    root = code_of(tmp_path)
    entries(root)
    shutil.rmtree(root / "docs")
    capsys.readouterr()
    assert rules(root) == {"--a must be 1, got …", "disk full"} and capsys.readouterr().err == ""
    (root / FILE).unlink()
    with pytest.raises(
        ValueError, match=r"messages.json must be in an installed vime, got no such file in .*; "
    ):
        entries(root)


def test_the_build_of_the_messages_needs_the_standard_library_only(tmp_path: Path) -> None:
    """An isolated build has only setuptools. It makes the same file as a checkout."""
    (tmp_path / "vime").mkdir()
    subprocess.run([sys.executable, "-I", "-S", sources.__file__, tmp_path], cwd=sources.ROOT, check=True)
    made = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    assert made["key"] == sources.key() and [ErrorMessage(*row) for row in made["messages"]] == entries()


def refusals() -> list[tuple[str, str]]:
    """Returns (reason, text) per `RequestRejected` of the session server, and per end of a session without one."""
    found = []
    for file in sorted((sources.ROOT / "slime/sessions").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RequestRejected":
                reason, said = (sources.expression_text(part, {}) for part in node.args[:2])
                found.append((reason or "", said or ""))
    return found


def test_every_answer_of_the_session_server_is_found() -> None:
    """The queries are its text with values, and the reason in the samples."""
    every = entries()
    texts = {said for _, said in refusals() if said.strip("…")}
    reasons = {reason for reason, _ in refusals()} - {"", "…", "error", "key"} | {
        "no_request",
        "reward",
        "time",
    }
    assert len(texts) > 25 and len(reasons) > 10
    assert not [text for text in texts if not search(text.replace("…", "7"), every)]
    for reason in reasons:
        assert any(reason in m.rule for m in search(f"session ended as {reason}", every)[:SHOWN]), reason


def test_the_command_prints_something_for_any_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("flamingo", "??? 7", "agent", "session"):
        assert main(["explain", words]) in (0, 1) and capsys.readouterr().out
