"""On a machine that lacks packages or runs another system, each command works or prints one line with the remedy."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.memory import cards
from slime.system import extras
from vime.commands import COMMANDS
from vime.explain import sources
from vime.explain.messages import entries

ROOT = Path(extras.__file__).parents[1]
RUNS = Path("no-such-folder")
LINES = [
    *([name] for name in COMMANDS if name != "serve"),
    *([name, "--help"] for name in COMMANDS),
    *(
        ["plan", "--device", device, "--hf-checkpoint", "m", "--rm-type", "math"]
        for device in ("cpu", "cuda")
    ),
    ["plan", "--gpu", "h100", "--hf-checkpoint", "m"],
    ["compare", "a", "b"],
    *([name, str(RUNS)] for name in ("plot", "ui", "watch", "trace", "audit", "export", "doctor")),
    *(["bench", tier, "x.yaml"] for tier in ("op", "module", "e2e", "plan", "report", "plot")),
    *(["flags", "lr"], ["flags", "--json"], ["models"], ["explain", "CUDA", "out", "of", "memory"]),
    *(["--help"], ["--version"], [], ["no-such-command"], ["completion", "bash"]),
]
CHILDREN = """
import contextlib, io, json, os, sys, traceback

hidden, platform, wheel, preload, lines = json.loads(sys.argv[1])

class Hide:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        installed = top not in sys.stdlib_module_names and top not in ("vime", "slime", "rl_kernel")
        if top in hidden or ("*" in hidden and installed):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
sys.platform = platform
from slime.system import extras
from slime.memory import cards
extras.IS_CHECKOUT = not wheel
from vime import cli
if preload:
    import vime.backends  # once for all children
for line in lines:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(line)
            except SystemExit as end:
                code = end.code
            except BaseException:
                code = traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            json.dump([code, out.getvalue(), err.getvalue()], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(json.dumps([line, *json.load(pipe)]))
    os.waitpid(child, 0)
"""


def answers(
    tmp_path: Path,
    *hidden: str,
    platform: str = "linux",
    wheel: bool = True,
    lines: list[list[str]] = LINES,
) -> list[tuple[list[str], object, str, str]]:
    """Returns the line, exit code, stdout and stderr per command, from children of a process that hides these
    packages."""
    argument = json.dumps([hidden, platform, wheel, hidden == tuple(BASE_HIDES), lines])
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, argument], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(lines)
    return found  # type: ignore[return-value]


def one_line_names_the_extra(line: list[str], err: str) -> None:
    assert err.startswith(f"vime {line[0]}") and err.count("\n") == 1, (line, err)
    assert "got none installed; install the extra: pip install 'vime[cpu]'" in err, (line, err)


def test_without_any_package_each_command_names_the_extra(tmp_path: Path) -> None:
    entries()  # the first `vime explain` of a checkout reads the messages of the code, and prints a line
    for line, code, out, err in answers(tmp_path, "*"):
        # once, this line came although the file of the messages had just been made (CI of 9ca08ad1, cause unknown)
        err = "".join(part for part in err.splitlines(True) if "once for each change of the code" not in part)
        assert code in (0, 1, 2), (line, code)
        assert "Traceback" not in err and "scripts/" not in out + err, (line, err)
        if "must have the package" in err:
            assert code == 2
            one_line_names_the_extra(line, err)
        if line in (["plan"], ["train"], ["flags", "lr"], ["plot", str(RUNS)], ["doctor"]):
            assert "must have the package" in err, line
        if line in ([], ["--help"], ["explain", "CUDA", "out", "of", "memory"]):
            assert (code, err) == (0, ""), line


BASE_HIDES = [
    *("aiohttp", "datasets", "matplotlib", "megatron", "msgspec", "pyarrow", "pydantic", "ray", "rich"),
    *("safetensors", "textual", "tokenizers", "torch", "transformers", "triton", "vllm", "vllm_router"),
]
"""Packages that are hidden: only the small base dependencies are left. torch is hidden too, because its import takes
seconds."""
FOR_HELP = ("train", "plan", "config", "serve", "doctor", "models", "explain", "completion", "trace", "watch")


def test_with_the_base_dependencies_help_works_or_names_the_extra(tmp_path: Path) -> None:
    lines = [*([name, "--help"] for name in COMMANDS), ["watch", str(RUNS)], ["doctor"], ["bench", "op"]]
    for line, code, out, err in answers(tmp_path, *BASE_HIDES, lines=lines):
        assert "scripts/" not in out + err and "examples/" not in out + err, line
        if line[0] in FOR_HELP and line[1:] == ["--help"]:
            assert (code, err) == (0, "") and "usage: vime" in out, (line, err)
        elif "must have the package" in err:
            one_line_names_the_extra(line, err)
        else:
            assert code in (0, 1, 2), (line, code)


def test_a_checkout_names_its_script_too(tmp_path: Path) -> None:
    ((_, code, _, err),) = answers(tmp_path, "ray", wheel=False, lines=[["train"]])
    remedy = "install the extra: pip install '.[cpu]' in the folder of vime, or bash scripts/setup.sh"
    assert (code, err) == (2, f"vime train must have the package ray, got none installed; {remedy}\n")


def test_a_plan_for_this_machine_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        cards.Cards()
    assert "package ray" in (extras.missing(raised.value, "vime plan") or "")


@pytest.mark.parametrize(
    ("name", "package"),
    [("yaml", "pyyaml"), ("megatron.core", "megatron-core"), ("vllm_router.router_args", "vllm-router")],
)
def test_the_package_has_the_name_that_pip_installs(name: str, package: str, hide: None) -> None:
    line = extras.missing(ModuleNotFoundError(name=name), "vime plan")
    assert line is not None and f"the package {package}, got none" in line


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_there", lambda top: False)


@pytest.mark.parametrize("name", ["vime.no_such", "slime.no_such", "yaml.no_such", None])
def test_a_fault_of_this_project_or_an_old_package_keeps_its_traceback(name: str | None) -> None:
    assert extras.missing(ModuleNotFoundError(name=name), "vime plan") is None


@pytest.mark.parametrize(
    ("platform", "line"),
    [
        ("darwin", "vime must run on Linux, got macOS; use a Linux machine or a Linux container\n"),
        ("win32", "vime must run on Linux, got Windows; use WSL 2 or a Linux container\n"),
    ],
)
def test_another_system_gets_one_line(platform: str, line: str, tmp_path: Path) -> None:
    absent = ("fcntl", "resource", "termios", "pwd", "grp") if platform == "win32" else ()
    for command, code, out, err in answers(tmp_path, "*", *absent, platform=platform):
        assert (code, out, err) == (2, "", line), command


def test_no_text_of_the_wheel_names_a_file_that_it_lacks() -> None:
    """Docstrings are not printed. `example` in a record is the link of a page. extras and cli check IS_CHECKOUT."""
    found = []
    for package in ("rl_kernel", "slime", "vime"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name in ("extras.py", "cli.py"):
                continue
            if FOLDERS.search(text := path.read_text()):
                found += [f"{path.relative_to(ROOT)}: {words}" for words in printed(ast.parse(text))]
    assert found == []
    assert FOLDERS.search(sources.page()) is None


FOLDERS = re.compile(r"\b(scripts|examples|requirements|tests)/")


def printed(tree: ast.Module) -> list[str]:
    """Returns the constants with the path of a file that only a checkout has."""
    unprinted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "example":
            unprinted.add(id(node.value))
        if isinstance(node, ast.IfExp) and "IS_CHECKOUT" in ast.unparse(node.test):
            unprinted |= {id(part) for part in ast.walk(node.body)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in unprinted
        and FOLDERS.search(node.value)
    ]
