"""The pages on hooks, architecture and the switch name code that exists; every hook and call has its row.

A code span `path.py: name, Class.method` claims that the file holds these names. The tables below OPERATORS and
HOOKS are the hook-point matrix: one row per call of rl_kernel in slime/, one row per `--*-path` flag that takes a
function.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from house_tree import ROOT, files, nodes, parse

import rl_kernel
from slime.config.core_table import core_flags
from slime.config.megatron_flags import HISTORICAL
from slime.rules.flags import own_flags
from slime.rules.listing import unsupported_flags
from vime.backends import BACKENDS
from vime.switch import FLAG_NAMES
from vime.vllm.server_flags import router_parser

MATRIX, SWITCH = "docs/hooks.md", "docs/design/rl-kernel-integration.md"
PAGES = (MATRIX, "docs/architecture.md", SWITCH)
OPERATORS, HOOKS = "### Operators", "### Hooks of users"
COLUMNS = (
    "operator",
    "side",
    "call site",
    "rl_kernel op",
    "tensor contract",
    "change surface",
    "stability",
)
SIDES = {"rollout", "conversion", "training"}
STABILITIES = {"public contract", "internal"}

Row = dict[str, str]

BACKEND_FLAGS = {name for backend in BACKENDS.values() for name in (*backend.specs, *backend.no_effect)}


def named(text: str) -> list[tuple[str, str]]:
    """Returns (file, name) for each span `path: name, name` of a page. The name is empty if the span is only a
    path.

    A span that begins with a file and continues in another form is a ValueError, because nothing would check it.
    """
    found = []
    for path, rest in re.findall(r"`([\w./-]+\.(?:py|sh))\b([^`]*)`", " ".join(text.split())):
        if rest and not re.fullmatch(r": [\w.]+(?:, [\w.]+)*", rest):
            raise ValueError(f"a span must be `file` or `file: name, name`, got `{path}{rest}`")
        found += [(path, name) for name in rest.removeprefix(": ").split(", ")]
    return found


def flags(text: str) -> set[str]:
    """Returns every flag that a page names, as a field name."""
    return {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text)}


def tables(text: str) -> Iterator[list[Row]]:
    """Yields the Markdown tables of a page, each as rows that map header cells to cells. A row of another width
    is an error."""
    lines = [line.strip() for line in text.splitlines()]
    for start, line in enumerate(lines):
        if not re.fullmatch(r"(\| -+ )+\|", line):
            continue
        head = cells(lines[start - 1])
        rows = []
        for row in lines[start + 1 :]:
            if not row.startswith("|"):
                break
            rows.append(dict(zip(head, cells(row), strict=True)))
        yield rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def matrix(heading: str) -> list[Row]:
    """Returns the only table between `heading` and the next heading of the matrix page."""
    part = (ROOT / MATRIX).read_text().split(f"\n{heading}\n")[1]
    (rows,) = tables(part.split("\n#")[0])
    return rows


@cache
def defined(path: Path) -> frozenset[str]:
    """Returns the functions, classes and assigned names of a file. Names inside classes and functions are dotted."""
    found = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(parse(path).body, "")
    return frozenset(found)


def kernel_calls(path: Path) -> set[tuple[str, str]]:
    """Returns (function, exported operator) for each use of rl_kernel in a file, for every form of import.

    An operator that is passed on without a call counts too. A nested function counts as its outermost function.
    Methods are written Class.method.
    """
    modules, direct = set(), {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name for a in node.names if a.name == "rl_kernel"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rl_kernel":
            direct |= {a.asname or a.name: a.name for a in node.names if a.name in rl_kernel.__all__}
    found = set()

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add((where, node.attr))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in direct:
            found.add((where, direct[node.id]))
        for child in ast.iter_child_nodes(node):
            inside = where
            if isinstance(child, ast.ClassDef) and not where:
                inside = child.name + "."
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
                not where or where[-1] == "."
            ):
                inside = where + child.name
            visit(child, inside)

    visit(parse(path), "")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_files_and_names_exist(page: str) -> None:
    spans = named((ROOT / page).read_text())
    assert len(spans) > 20, "the page must name files as `path.py: name`"
    known = {str(path): path for path in files()}
    missing = [
        f"{path}: {name}".rstrip(": ")
        for path, name in spans
        if path not in known or (name and name not in defined(known[path]))
    ]
    assert not missing, f"{page} must name what exists, got {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_variables_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    unknown = flags(text) - set(own_flags()) - set(unsupported_flags(BACKENDS)) - BACKEND_FLAGS
    if unknown:
        unknown -= {*HISTORICAL, *core_flags()}
        unknown -= {f"router_{action.dest}" for action in router_parser()._actions}
    assert not unknown, f"{page} must name flags of slime.config, got {sorted(unknown)}"
    assert set(re.findall(r"\bVIME_\w+", text)) <= set(FLAG_NAMES)


def test_every_variable_of_the_switch_is_told() -> None:
    assert set(re.findall(r"\bVIME_\w+", (ROOT / SWITCH).read_text())) == set(FLAG_NAMES)


@pytest.mark.parametrize("page", PAGES)
def test_rl_kernel_names_exist(page: str) -> None:
    """`rl_kernel.X` must be exported, and `rl_kernel.module.X` must exist."""
    for name in re.findall(r"\brl_kernel\.([a-z_]\w*(?:\.\w+)*)", (ROOT / page).read_text()):
        first, _, rest = name.partition(".")
        if first == "py":
            continue
        if rest:
            pkgutil.resolve_name(f"rl_kernel.{name}")  # the error names the missing part
        else:
            assert name in rl_kernel.__all__, f"rl_kernel.{name}"


@pytest.mark.parametrize("heading", [OPERATORS, HOOKS])
def test_rows_are_complete(heading: str) -> None:
    for row in matrix(heading):
        assert tuple(row) == COLUMNS
        assert all(row.values()), f"no cell may be empty: {row}"
        assert set(row["side"].split(", ")) <= SIDES, row
        assert row["stability"] in STABILITIES, row
        sites = named(row["call site"])
        assert sites and all(name for _, name in sites), f"the call site must be `file: function`: {row}"


def test_every_call_of_rl_kernel_is_a_row_and_every_row_a_call() -> None:
    told = {
        (path, name, operator)
        for row in matrix(OPERATORS)
        for path, name in named(row["call site"])
        for operator in re.findall(r"rl_kernel\.(\w+)", row["rl_kernel op"])
    }
    found = {
        (str(path), *call) for path in files(".py") if path.parts[0] == "slime" for call in kernel_calls(path)
    }
    assert told == found, f"without a row: {sorted(found - told)}; without a call: {sorted(told - found)}"


def test_every_function_flag_is_a_row() -> None:
    """Each flag that ends in -path names a function (slime/rules/validate.py loads it), except the flag of the
    YAML file."""
    hooks = {name for name in own_flags() if name.endswith("_path")} - {"custom_config_path"}
    told = [name for row in matrix(HOOKS) for name in flags(row["operator"])]
    assert sorted(told) == sorted(hooks)


def test_a_wrong_name_is_seen(tmp_path: Path) -> None:
    """The readers above find wrong names on a page and in a file with known content."""
    text = "see `slime/loop.py:\nrun, publish` and `slime/no.py`, --rlk-fast off\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    assert named(text) == [("slime/loop.py", "run"), ("slime/loop.py", "publish"), ("slime/no.py", "")]
    with pytest.raises(ValueError, match="got `slime/loop.py:run`"):
        named("`slime/loop.py:run`")
    assert flags(text) == {"rlk_fast"}
    assert list(tables(text)) == [[{"a": "1", "b": "2"}]]
    trainer = defined(Path("slime/megatron_backend/step/trainer.py"))
    assert "MegatronTrainer.train" in trainer
    assert "reduce_metrics" in defined(Path("slime/megatron_backend/step/loss.py"))
    assert {"COLUMNS", "Column.read_samples"} <= defined(Path("slime/data/columns.py"))
    assert not {"MegatronTrainer.trains", "train", "missing"} & trainer
    source = tmp_path / "uses.py"
    source.write_text(
        "import rl_kernel as rk\nfrom rl_kernel.ops.logp import logp as fast\n"
        "class A:\n    def f(self):\n        def g():\n            return rk.ratio_kl(1, 2)\n        return fast\n"
    )
    assert kernel_calls(source) == {("A.f", "ratio_kl"), ("A.f", "logp")}
