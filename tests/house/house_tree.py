"""Lists the files of the repository, their syntax trees and their imports for the house tests."""

from __future__ import annotations

import ast
import gc
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rl_kernel", "slime", "vime")


@cache
def files(*suffixes: str) -> tuple[Path, ...]:
    """Returns the files that git tracks or would track, relative to ROOT. Build outputs and runs are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = sorted({Path(name) for name in listed.split("\0") if name})
    return tuple(p for p in paths if (ROOT / p).is_file() and (not suffixes or p.suffix in suffixes))


def package_files() -> list[Path]:
    return [p for p in files(".py") if p.parts[0] in PACKAGES]


@cache
def parse(path: Path) -> ast.Module:
    """Returns the tree of a file, relative to ROOT. The garbage collector ignores it: all trees together have two
    million objects, and none of them is garbage before the last house test."""
    tree = ast.parse((ROOT / path).read_text(), filename=str(path))
    gc.freeze()
    return tree


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file's tree, as `ast.walk` yields them. Many house tests look at all of them."""
    return tuple(ast.walk(parse(path)))


def forget_trees() -> None:
    """Frees the trees, which take 500 MiB."""
    for cached in (parse, nodes, imported):
        cached.cache_clear()


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


@cache
def imported(path: Path, *, top_level_only: bool = False) -> tuple[tuple[str, int], ...]:
    """Returns (dotted name, line) for each import in a file. `from a import b` counts as a.b, because b may be a
    module.

    With `top_level_only`, only imports that run with the module count: no function bodies and no TYPE_CHECKING
    blocks.
    """
    found: list[tuple[str, int]] = []
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found.extend((f"{stem}.{alias.name}", node.lineno) for alias in node.names)
        elif top_level_only and _runs_later(node):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parse(path))
    return tuple(found)
