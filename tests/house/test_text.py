"""Tests the text rules of the house: no file depends on one machine, hides a fault, or names a missing file."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from house_tree import ROOT, files, nodes, parse

THIS = Path("tests/house/test_text.py")

FORBIDDEN = {
    "an absolute path of one machine": r"(?<![\w.$}/-])/(?:root|home|work|Users|mnt|opt)/",
    "a package index host": r"pypi\.org|pythonhosted|download\.pytorch\.org|--(?:extra-)?index-url|--find-links",
    "killing processes by name": r"\b(?:pkill|killall)\b|ray stop",
    "a server open to every network by default": r"0\.0\.0\.0",
}


def text_files() -> list[Path]:
    suffixes = (
        ".py",
        ".sh",
        ".js",
        ".css",
        ".html",
        ".md",
        ".toml",
        ".txt",
        ".yaml",
        ".yml",
        ".json",
        ".cfg",
        "",
    )
    return [p for p in files() if p.suffix in suffixes and p != THIS]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_text(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    hits = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not hits, f"{what}:\n" + "\n".join(hits)


def test_forbidden_patterns_match_what_they_mean() -> None:
    matches = {what: re.compile(p).search for what, p in FORBIDDEN.items()}
    assert matches["an absolute path of one machine"]('open("/home/me/x")')
    assert not matches["an absolute path of one machine"]("see docs/home/page and $ROOT/work/x and ../opt/y")
    assert matches["killing processes by name"]("pkill -9 ray")
    assert matches["a server open to every network by default"]("--host 0.0.0.0")


def test_no_bare_or_broad_except() -> None:
    """`except:` is an error. `except Exception` needs a handler that raises, or a comment that names the process
    border."""
    hits = []
    for path in files(".py"):
        lines = (ROOT / path).read_text().splitlines()
        for node in nodes(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = (
                {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"nothing"}
            )
            if not names & {"nothing", "Exception", "BaseException"}:
                continue
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            explained = "#" in lines[node.lineno - 1] or lines[node.lineno].lstrip().startswith("#")
            if "nothing" in names or not (raises or explained):
                hits.append(f"{path}:{node.lineno}")
    assert not hits, "broad except without a raise or a comment that names the border: " + ", ".join(hits)


def test_zip_says_strict() -> None:
    hits = [
        f"{path}:{node.lineno}"
        for path in files(".py")
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "zip"
        and len(node.args) > 1
        and "strict" not in {k.arg for k in node.keywords}
    ]
    assert not hits, "zip must say strict=: " + ", ".join(hits)


def test_python_files_say_what_they_own() -> None:
    """Every module of the packages and scripts has a docstring; an empty __init__ needs none."""
    missing = [
        str(path)
        for path in files(".py")
        if path.parts[0] in ("rl_kernel", "slime", "vime", "scripts")
        and parse(path).body
        and not ast.get_docstring(parse(path))
    ]
    assert not missing


@pytest.mark.parametrize("path", [str(p) for p in files(".sh")] + [".ci/run"])
def test_shell_scripts_parse(path: str) -> None:
    done = subprocess.run(["bash", "-n", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [str(p) for p in files(".sh") if "models" not in p.parts] + [".ci/run"])
def test_shell_scripts_stop_at_the_first_error(path: str) -> None:
    assert "set -euo pipefail" in (ROOT / path).read_text()


def named_paths(text: str) -> set[str]:
    """Returns the paths that a page claims exist: link targets, and `folder/file` in code spans, without patterns
    and outputs."""
    links = re.findall(r"\]\(([^)#\s]+)", text)
    spans = re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", text)
    first = {p.parts[0] for p in files()} - {"runs"}
    return {p for p in links if "://" not in p} | {s for s in spans if s.split("/")[0] in first}


def test_pages_name_files_that_exist() -> None:
    missing = []
    for page in files(".md"):
        for name in sorted(named_paths((ROOT / page).read_text())):
            if not (ROOT / page.parent / name).exists() and not (ROOT / name).exists():
                missing.append(f"{page}: {name}")
    assert not missing, "pages must name files that exist:\n" + "\n".join(missing)


def test_named_paths() -> None:
    text = "see [a](docs/a.md) and [b](https://x.y/z), `slime/types.py`, `no/such`, `--a/b`, `runs/x/y`"
    assert named_paths(text) == {"docs/a.md", "slime/types.py"}
