"""Each block of README.md, docs/ and examples/ runs here, runs in a named test, is checked, or has a title with
its needs.

This file runs each fenced bash block without a title, in a scratch folder. A title "needs ..." names a GPU, a
network or several hosts, which no test machine has: the names of its flags are checked. A title "takes ..." marks
a slow command: COVERED, or the test that an example's page names, runs it. Each Python block without a row in
PARTS runs.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from checkouts import in_shell, linked_checkout
from doc_blocks import (
    RUN_WHOLE,
    Block,
    accepted_flags,
    all_blocks,
    blocks,
    blocks_of,
    check_command,
    flags_of_runs,
    help_of,
)
from house_tree import ROOT

from slime.models.families.qwen import qwen3
from slime.tracking.run_record import recorded
from slime.tracking.samples import write_samples
from slime.types import Sample
from vime import cli

COVERED = {
    r"bash scripts/setup\.sh": "tests/house/test_setup.py",
    r"bash scripts/test\.sh.*": ".ci/run",
    r"(OUT=\S+ )?(MODE=\S+ )?bash scripts/run-tiny-grpo\.sh.*": "tests/e2e/runs/test_first_command.py",
    r"PLAN=1 (MODE=\w+ )?(NUM_GPUS=\d+ )?bash scripts/run-qwen3-4b-grpo\.sh.*": "tests/scripts/test_qwen3_script.py",
}
"""Commands that another test runs, each with its test file, which names the same script."""


def covered(command: str) -> str | None:
    """Returns the test file that runs a command, or None."""
    return next((by for pattern, by in COVERED.items() if re.fullmatch(pattern, command)), None)


TO_RUN = [b for b in blocks("bash") if not b.marked]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_checkout(tmp_path_factory.mktemp("checkout"))


def run(command: str, scratch: Path) -> None:
    """Runs one command. `vime ...` runs in this process, which has its imports already; any other command runs in
    a shell."""
    if command.startswith("vime "):
        assert cli.main(shlex.split(command)[1:]) == 0, command
    else:
        in_shell(command, scratch)


@pytest.mark.parametrize("block", TO_RUN, ids=lambda b: b.name)
def test_commands_run(block: Block, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scratch)
    for command in block.commands():
        if covered(command) is None:
            run(command, scratch)


def test_marks_are_known() -> None:
    wrong = [f"{b.page}:{b.line}: {b.title}" for b in blocks("bash") if b.title and not b.marked]
    assert not wrong, 'a title of a bash block must begin with "needs " or "takes ": ' + "; ".join(wrong)


def named_tests(block: Block) -> list[str]:
    """Returns the tests that run a whole page, or the tests that an example's page names and that name the
    example."""
    if block.page in RUN_WHOLE:
        return [RUN_WHOLE[block.page]]
    page, folder = ROOT / block.page, Path(block.page).parent
    named = re.findall(r"tests/e2e/[\w/]+\.py", page.read_text()) if folder.parts[0] == "examples" else []
    return [test for test in named if folder.name in (ROOT / test).read_text()]


def test_slow_commands_are_run_by_another_test() -> None:
    slow = [b for b in blocks("bash") if b.title.startswith("takes ")]
    lacking = [
        c for b in slow for c in b.commands() if not (covered(c) or c.startswith("source ") or named_tests(b))
    ]
    assert slow and not lacking, f"COVERED must name who runs: {lacking}"
    for pattern, by in COVERED.items():
        script = re.search(r"scripts/([\w-]+)", pattern)
        assert script and script[1] in (ROOT / by).read_text(), (
            f"{by} must run scripts/{script and script[1]}.sh"
        )


CHECKED = [b for b in blocks("bash") if b.marked]
UNCHECKED = {
    "docs/from-slime.md": "the arrays are of the reader's script",
    "docs/profile.md": "a loop of the shell over py-spy",
    "examples/qwen2.5-0.5b-gsm8k/README.md": "a loop of the shell over downloads",
    "examples/smollm2-135m-gsm8k/README.md": "a loop of the shell over downloads",
}
"""Pages with a block whose first line is not a command, each with the reason."""


@pytest.mark.parametrize("block", CHECKED, ids=lambda b: b.name)
def test_commands_have_flags_files_and_hooks_that_exist(
    block: Block, scratch: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scratch)
    if block.page in UNCHECKED and re.match(r"for |vime plan \"\$", block.text):
        return
    for command in block.commands():
        check_command(command, block, models)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_a_wrong_flag_file_variable_or_hook_is_found(models: Path, scratch: Path, monkeypatch) -> None:
    monkeypatch.chdir(scratch)
    page = Block("docs/agents.md", 1, "bash", "needs GPUs", "")
    good = next(b for b in CHECKED if b.page == "docs/agents.md").commands()[0]
    for command, wrong, text in (
        (good, good.replace("--input-key", "--inputkey"), "inputkey"),
        (good, good.replace("my_agent.score", "my_agent.scores"), "my_agent.score"),
        (good, good.replace("PYTHONPATH=$PWD ", ""), "my_agent"),
        ("vime ui RUN --export F", "vime ui RUN --exports F", "no --exports"),
        ("vime bench e2e F -- --lr 1", "vime bench e2e F -- --lrr 1", "no --lrr"),
        ("bash scripts/test.sh", "bash scripts/tests.sh", "no scripts/tests.sh"),
        ("MODE=async bash scripts/run-tiny-grpo.sh", "MOOD=x bash scripts/run-tiny-grpo.sh", "not read MOOD"),
        ("hf download", "hg download", "not in FOREIGN"),
    ):
        check_command(command, page, models)
        with pytest.raises((AssertionError, ValueError), match=text):
            check_command(wrong, page, models)


PARTS = {
    r"docs/operators/\w+\.md": "definitions; tests/rl_kernel/test_pages.py runs the examples",
    r"docs/hooks\.md": "a part of a function",
    r"docs/served-models\.md": "a part of a function",
    r"docs/python-api\.md": "needs a model; tests/e2e/examples/test_python_api.py runs such programs",
    r"docs/testing\.md": "a file of tests; tests/vime/testing has such files",
}
"""Pages with a Python block that is not a program, each with the reason. The test runs its imports and compiles
it."""


def names_of_a_run(folder: Path) -> dict[str, object]:
    """Returns the variables of an ended run: its directory, and a sample of rollout 3."""
    with recorded(folder, rollouts=1):
        pass
    (folder / "config.json").write_text(json.dumps({"num_rollout": 1}))
    write_samples(folder, 3, [Sample(tokens=[1, 2], response_length=1)], range(1), str)
    return {"run_dir": folder}


NAMES: dict[str, Callable[[Path], dict[str, object]]] = {
    "docs/adding-a-model.md": lambda _: dict(vars(qwen3)),
    "docs/journal.md": names_of_a_run,
}
"""Page -> the names that its Python blocks use."""


@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.name)
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    if block.page in RUN_WHOLE:
        assert block.page in (ROOT / RUN_WHOLE[block.page]).read_text()
        return
    if block.page in NAMES:
        exec(compile(block.text, block.name, "exec"), NAMES[block.page](tmp_path))
        return
    if block.title.endswith(".py"):
        code = compile(block.text, block.name, "exec")
        exec(code, {"__name__": block.title.removesuffix(".py")})
        return
    assert any(re.fullmatch(page, block.page) for page in PARTS), (
        f"{block.name} needs a file name, or a row in PARTS"
    )
    body = ast.parse("async def part():\n" + textwrap.indent(block.text, "    ") + "    pass").body[0].body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), block.name, "exec"), {})


def is_yaml(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


def is_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def is_output(block: Block) -> None:
    """Checks that flags and vime commands in a block of formulas or output exist."""
    for command in block.commands():
        if found := re.match(r"(?:\$ )?vime (\w+) |--\w", command):
            unknown = (
                set(re.findall(r"(?<= )--[a-z][\w-]+", f" {command}")) - flags_of_runs() - accepted_flags()
            )
            shown = help_of(found[1]) if found[1] else ""
            assert not [flag for flag in unknown if flag not in shown], f"{block.name}: {unknown}"


KINDS: dict[str, Callable[[Block], None]] = {
    "yaml": is_yaml,
    "json": is_json,
    "text": is_output,
    "console": is_output,
}
"""The check for each language of a block that is not a program."""


@pytest.mark.parametrize("language", sorted(KINDS))
def test_other_blocks(language: str) -> None:
    for block in blocks(language):
        KINDS[language](block)


def test_no_block_is_left_out() -> None:
    known = {"bash", "python", *KINDS}
    assert not [b.name for b in all_blocks() if b.language not in known]
    fences = sum(
        len(re.findall(r"^```", (ROOT / page).read_text(), re.M)) for page in {b.page for b in all_blocks()}
    )
    assert fences == 2 * len(all_blocks()), "a fence has a form that FENCE does not read"


def test_commands_of_a_block() -> None:
    text = '# A\n```bash title="needs a GPU"\nx\n```\n```bash\na --b \\\n    c  # why\nd && e\n```\n```text\nz\n```\n'
    first, second, _ = blocks_of("p.md", text)
    assert first.marked and not second.marked and second.line == 5
    assert second.commands() == ["a --b c", "d", "e"]
    assert covered("bash scripts/setup.sh") and not covered("bash scripts/other.sh")
