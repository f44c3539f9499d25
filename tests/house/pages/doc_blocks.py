"""Parses the fenced blocks of the pages, and checks the flags of commands that no test machine can run."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import plan_examples
from house_tree import ROOT, files

from slime.config.core_table import core_flags
from slime.config.fields import spelled
from slime.config.megatron_flags import HISTORICAL
from slime.environments.hubs import find_environment
from vime import cli
from vime.backends import parse_config, public_rows
from vime.commands import COMMANDS

FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.M | re.S)
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.S)
_MODELS = (
    "--hf-checkpoint",
    "--ref-load",
    "--load",
    "--critic-load",
    "--opd-teacher-load",
    "--opd-teacher-model",
)
"""Flags whose checkpoint a test machine does not have. The test replaces it by a folder with the model's
config.json."""
FOREIGN = [
    "docker",
    "echo",
    "enroot",
    "export",
    "for",
    "hf",
    "install",
    "kubectl",
    "pip",
    "python3.12",
    "source",
    "done",
    "do",
    "sbatch",
    "srun",
]
"""Foreign programs and words of the shell, whose commands are not checked."""
OF_READER = ("run.yaml", "run.sh", "my-run.yaml", "sums.yaml", "ask.py")
"""Files that only the reader has."""
RUN_WHOLE = {"docs/your-own.md": "tests/e2e/runs/test_first_command.py"}
"""Pages whose blocks run one after the other, each with the test that runs them."""
MADE_BEFORE = (
    "docs/console.md",
    "docs/int4.md",
    "examples/int4-qat/",
    "examples/judge-reward/",
    "examples/opd/",
    "examples/qwen2.5-0.5b-gsm8k/",
    "examples/smollm2-135m-gsm8k/",
)
"""Pages whose commands read models or data that an earlier command writes. Only the names of their flags are
checked."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def marked(self) -> bool:
        return self.title.startswith(("needs ", "takes "))

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Returns one string per command: continued lines joined, comments removed, `a && b` as two commands."""
        text = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        return [" ".join(part.split()) for line in lines if line for part in line.split(" && ")]


def blocks_of(page: str, text: str) -> list[Block]:
    return [
        Block(page, text[: m.start()].count("\n") + 1, m[1], m[2] or "", m[3]) for m in FENCE.finditer(text)
    ]


def pages() -> list[str]:
    names = [str(path) for path in files(".md")]
    return [n for n in names if n in ("CONTRIBUTING.md", "README.md") or n.startswith(("docs/", "examples/"))]


@cache
def all_blocks() -> list[Block]:
    return [b for page in pages() for b in blocks_of(page, (ROOT / page).read_text())]


def blocks(language: str) -> list[Block]:
    return [b for b in all_blocks() if b.language == language]


@cache
def flags_of_runs() -> frozenset[str]:
    """Returns the flags of `vime train`, Megatron's among them, and their --no- forms."""
    flags = {row["flag"] for row in public_rows()} | {spelled(name) for name in (*core_flags(), *HISTORICAL)}
    return frozenset(flags | {f"--no-{flag[2:]}" for flag in flags} | {"--config"})


@cache
def accepted_flags() -> frozenset[str]:
    """Returns every flag of a run, with the flags of engines and routers."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        cli.main(["flags", "--json"])
    return frozenset(row["flag"] for row in json.loads(shown.getvalue()))


@cache
def help_of(*command: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return shown.getvalue()


def check_command(command: str, block: Block, folder: Path) -> None:
    """Raises AssertionError or ValueError for a command with a flag, file or hook that does not exist. The models
    are written to `folder`."""
    words = shlex.split(command)
    environment: dict[str, str] = {}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        environment[found[1]] = found[2]
        del words[0]
    if not words or Path(words[0]).name in FOREIGN or words[0].startswith("$"):
        return
    program, *argv = words
    if program == "vime":
        _check_vime(argv, block, folder, environment)
        return
    assert program in ("bash", "python"), f"{block.name}: {program} is not in FOREIGN"
    if argv[0] in ("-c", "-m", *OF_READER):
        return
    script = ROOT / argv[0]
    assert script.is_file(), f"{block.name}: there is no {argv[0]}"
    text = script.read_text() + "".join(p.read_text() for p in (ROOT / "scripts/lib").glob("*.sh"))
    for name in environment:
        assert re.search(rf"\b{name}\b", text), f"{block.name}: {argv[0]} does not read {name}"
    for flag in _flags(argv):
        known = re.search(rf"{flag}\b", text) or flag in flags_of_runs()
        assert known, f"{block.name}: {argv[0]} has no {flag}"


def _check_vime(argv: list[str], block: Block, folder: Path, environment: dict[str, str]) -> None:
    name, *rest = argv
    assert name in COMMANDS, f"{block.name}: there is no vime {name}"
    if name == "train" or (name == "plan" and not {"--compare", "--search"} & set(rest)):
        if block.page.startswith(MADE_BEFORE) or set(OF_READER) & set(rest):
            rest = ["--", *rest]  # after "--", only the names of the flags are checked
        else:
            with _path(environment.get("PYTHONPATH", ""), block, folder):
                parse_config(_with_models(rest, block, folder))
            return
    own, _, passed = f" {' '.join(rest)} ".partition(" -- ")
    verbs = rest[:1] if not rest or re.fullmatch(r"[a-z]\w*", rest[0]) else []
    shown = help_of(name, *verbs) + help_of(name)
    for flag in _flags(own.split()):
        known = re.search(rf"{flag}\b", shown) or flag in flags_of_runs() or flag in accepted_flags()
        assert known, f"{block.name}: vime {' '.join([name, *verbs])} has no {flag}"
    for flag in _flags(passed.split()):
        known = flag in flags_of_runs() or flag in accepted_flags()
        assert known, f"{block.name}: vime train has no {flag}"


def _flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]


def _with_models(argv: list[str], block: Block, folder: Path) -> list[str]:
    """Replaces each model of the command line by a folder that has only a config.json, and each prompt file and each
    environment by an existing file."""
    found = list(argv)
    images = "--multimodal-keys" in argv or "vision" in block.page
    usual = "qwen3-vl-4b" if images else "qwen3-0.6b"
    for place, word in enumerate(argv[:-1]):
        if word in _MODELS and not argv[place + 1].startswith("--"):
            wanted = Path(argv[place + 1]).name.lower(), Path(block.page).parent.name
            arch = next((name for name in wanted if name in plan_examples.MODELS), usual)
            found[place + 1] = str(plan_examples.write_model(arch, folder))
        if word in ("--prompt-data", "--eval-prompt-data"):
            # --eval-prompt-data has pairs: the name of an evaluation set, and its path.
            rest = itertools.takewhile(lambda value: not value.startswith("--"), argv[place + 1 :])
            count, step = (1, 1) if word == "--prompt-data" else (len(list(rest)), 2)
            for file in range(place + step, place + 1 + count, step):
                found[file] = str(plan_examples.write_model("qwen3-0.6b", folder) / "prompts.jsonl")
        if word == "--environment":  # the hub's package is not installed here
            find_environment(argv[place + 1])
            prompts = plan_examples.write_model("qwen3-0.6b", folder) / "prompts.jsonl"
            found[place : place + 2] = ["--prompt-data", str(prompts)]
    return found


@contextlib.contextmanager
def _path(python_path: str, block: Block, folder: Path) -> Iterator[None]:
    """Puts the command's PYTHONPATH on sys.path. $PWD becomes a folder with the modules that the page shows."""
    shown = folder / "shown" / re.sub(r"\W", "_", block.page)
    shown.mkdir(parents=True, exist_ok=True)
    modules = [b for b in blocks("python") if b.page == block.page and b.title.endswith(".py")]
    for module in modules:
        (shown / module.title).write_text(module.text)
    there = [
        str(shown) if part == "$PWD" else part.replace("$PWD", str(ROOT)) for part in python_path.split(":")
    ]
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = filter(None, there)
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(filter(None, there)) or "?"):
                del sys.modules[name]
