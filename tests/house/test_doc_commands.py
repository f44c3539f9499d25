"""Every command in README.md and docs/ runs, is run by a named test, or says what it needs.

A fenced bash block without a title is run here, in a scratch folder. A title "needs ..." marks what no test machine has
(a GPU, a network, several hosts). A title "takes ..." marks what is slow: COVERED then names who runs it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkouts import in_shell, linked_checkout
from house_tree import ROOT, files

from vime import cli

COVERED = {
    r"bash scripts/setup\.sh": "tests/house/test_setup.py",
    r"bash scripts/test\.sh.*": ".ci/run",
    r"(OUT=\S+ )?(MODE=\S+ )?bash scripts/run-tiny-grpo\.sh.*": "tests/e2e/runs/test_first_command.py",
    r"PLAN=1 (NUM_GPUS=\d+ )?bash scripts/run-qwen3-4b-grpo\.sh.*": "tests/scripts/test_qwen3_script.py",
}
"""Commands that another test runs -> its file, which names the same script."""
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def marked(self) -> bool:
        return self.title.startswith(("needs ", "takes "))

    def commands(self) -> list[str]:
        """One string per command: continued lines joined, comments removed, `a && b` as two commands."""
        text = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        return [" ".join(part.split()) for line in lines if line for part in line.split(" && ")]


def blocks_of(page: str, text: str) -> list[Block]:
    return [
        Block(page, text[: m.start()].count("\n") + 1, m[1], m[2] or "", m[3]) for m in FENCE.finditer(text)
    ]


def pages() -> list[str]:
    names = [str(path) for path in files(".md")]
    return [n for n in names if n in ("CONTRIBUTING.md", "README.md") or n.startswith("docs/")]


def blocks(language: str) -> list[Block]:
    return [b for p in pages() for b in blocks_of(p, (ROOT / p).read_text()) if b.language == language]


def covered(command: str) -> str | None:
    """The file that runs a command."""
    return next((by for pattern, by in COVERED.items() if re.fullmatch(pattern, command)), None)


TO_RUN = [b for b in blocks("bash") if not b.marked]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_checkout(tmp_path_factory.mktemp("checkout"))


def run(command: str, scratch: Path) -> None:
    """One command: `vime ...` in this process, which has loaded everything already, any other in a shell."""
    if command.startswith("vime "):
        assert cli.main(shlex.split(command)[1:]) == 0, command
    else:
        in_shell(command, scratch)


@pytest.mark.parametrize("block", TO_RUN, ids=lambda b: f"{b.page}:{b.line}")
def test_commands_run(block: Block, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scratch)
    for command in block.commands():
        if covered(command) is None:
            run(command, scratch)


def test_marks_are_known() -> None:
    wrong = [f"{b.page}:{b.line}: {b.title}" for b in blocks("bash") if b.title and not b.marked]
    assert not wrong, 'a title of a bash block must begin with "needs " or "takes ": ' + "; ".join(wrong)


def test_slow_commands_are_run_by_another_test() -> None:
    slow = [b for b in blocks("bash") if b.title.startswith("takes ")]
    lacking = [c for b in slow for c in b.commands() if covered(c) is None and not c.startswith("source ")]
    assert slow and not lacking, f"COVERED must name who runs: {lacking}"
    for pattern, by in COVERED.items():
        script = re.search(r"scripts/([\w-]+)", pattern)
        assert script and script[1] in (ROOT / by).read_text(), (
            f"{by} must run scripts/{script and script[1]}.sh"
        )


MODULES = [b for b in blocks("python") if b.title.endswith(".py")]
"""Python blocks with a file name as their title: whole modules. Others are formulas."""


@pytest.mark.parametrize("block", MODULES, ids=lambda b: f"{b.page}:{b.line}")
def test_modules_run(block: Block) -> None:
    code = compile(block.text, f"{block.page}:{block.line}", "exec")
    exec(code, {"__name__": block.title.removesuffix(".py")})


def test_commands_of_a_block() -> None:
    text = '# A\n```bash title="needs a GPU"\nx\n```\n```bash\na --b \\\n    c  # why\nd && e\n```\n```text\nz\n```\n'
    first, second, _ = blocks_of("p.md", text)
    assert first.marked and not second.marked and second.line == 5
    assert second.commands() == ["a --b c", "d", "e"]
    assert covered("bash scripts/setup.sh") and not covered("bash scripts/other.sh")
