"""The documentation site builds strictly, needs no other host, and its generated pages agree with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import docs_algorithms
import docs_configuration
import docs_errors
import docs_extensions
import docs_families
import docs_long
import docs_models
import docs_peers
import pytest
import yaml
from house_tree import ROOT

from vime.explain import sources

LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?([^"'\s>]+)|<link[^>]*\shref=["']?([^"'\s>]+)"""
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Runs `mkdocs build --strict` with a configuration file."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def loaded(page: str) -> list[str]:
    """Returns the addresses that a browser loads when it shows the page: scripts, styles, pictures, frames."""
    return [first or second for first, second in LOADED.findall(page)]


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    foreign = {f"{p.name}: {a}" for p in pages for a in loaded(p.read_text()) if re.match("(https?:)?//", a)}
    styles = {p.name for p in site.rglob("*.css") if re.search(r"url\([\"']?https?:", p.read_text())}
    assert not foreign and not styles


def test_loaded_addresses_are_found() -> None:
    page = '<link rel="stylesheet" href="a.css"><script src=b.js></script><a href="c.html">c</a><img src="d.svg">'
    assert loaded(page) == ["a.css", "b.js", "d.svg"]


def test_contributing_is_a_page_of_the_site(site: Path) -> None:
    text = (site / "contributing.html").read_text()
    assert "Subject, verb, object" in text and 'href="status.html"' in text


def test_broken_links_end_the_build(tmp_path: Path) -> None:
    """The build names a missing page, anchor or source file, and a page that is not in the navigation."""
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(
        "# A\n\n[p](gone.md) [a](#nowhere) [s](../slime/gone.py) [fine](../slime/loop.py)\n"
    )
    (pages / "hidden.md").write_text("# Not in the navigation\n")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config |= {"docs_dir": str(pages), "hooks": [str(ROOT / "scripts/docs_hooks.py")], "nav": ["index.md"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    warnings = [
        line for line in done.stderr.splitlines() if "WARNING" in line or line.lstrip().startswith("- ")
    ]
    for word in ("gone.md", "#nowhere", "slime/gone.py", "hidden.md"):
        assert any(word in line for line in warnings), (word, done.stderr)
    assert not any("loop.py" in line for line in warnings)


@pytest.mark.parametrize(
    "module",
    [docs_configuration, docs_algorithms, docs_families, docs_extensions, docs_long],
    ids=["configuration", "algorithms", "families", "extensions", "long sequences"],
)
def test_generated_pages_are_up_to_date(module) -> None:
    assert (ROOT / module.PAGE).read_text() == module.page(), (
        f"{module.PAGE} is out of date: run {module.COMMAND}"
    )


@pytest.mark.parametrize("path", docs_models.TABLES, ids=str)
def test_tables_of_families_are_up_to_date(path: Path) -> None:
    assert (ROOT / path).read_text() == docs_models.page(path), f"{path}: run {docs_models.COMMAND}"


@pytest.mark.parametrize("program", docs_peers.PAGES)
def test_tables_of_other_programs_are_up_to_date(program: str) -> None:
    page = docs_peers.PAGES[program]
    assert (ROOT / page).read_text() == docs_peers.page(program), f"{page}: run {docs_peers.COMMAND}"


def test_both_first_pages_show_the_same_run() -> None:
    """README.md and the quick start show the output of the same command, from the same run."""
    shown = [
        re.search(r"```text\n(eval at step 0.*?)```", (ROOT / page).read_text(), re.S)
        for page in ("README.md", "docs/quick-start.md")
    ]
    assert shown[0] and shown[1] and shown[0][1] == shown[1][1]


def test_every_error_message_has_a_remedy() -> None:
    """The remedy is the end of the message, or a note of docs/troubleshooting.toml."""
    assert not docs_errors.without_remedy(), f"say what to do in the message or in {docs_errors.NOTES}"
    assert not docs_errors.unused_notes(), f"no message contains these keys of {docs_errors.NOTES}"


def test_messages_are_read_from_the_code(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        'def f(x):\n    """x must be 1, got 2: a docstring is no message."""\n'
        '    if x: raise ValueError(f"--a must be above {x}, got {x}; raise it")\n'
        '    said = f"{x} must be " "known, got " + str(x)\n    raise KeyError("internal")\n'
        'raise RuntimeError("engine died")\n'
    )
    found = {(m.rule, m.remedy) for m in sources.find_messages(file, tmp_path)}
    assert found == {
        ("--a must be above …, got …", "raise it"),
        ("… must be known, got …", ""),
        ("engine died", ""),
    }
