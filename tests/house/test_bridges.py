"""Only bridges may replace symbols of foreign programs, and each record of a bridge names a symbol that exists."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from house_tree import ROOT, nodes, package_files
from packaging.specifiers import SpecifierSet

from slime import bridges
from vime.doctor import patches

OWN = {"vime", "slime", "rl_kernel"}
BRIDGES = {"slime/bridges", "vime/vllm/patches.py", "vime/vllm/versions.py", "vime/sglang/patches.py"}
"""Folders and files that may replace symbols."""
SETTINGS = {"triton.knobs.compilation.listener"}
"""Attributes of a program that its users may set."""
MOST_OF_VLLM = 15


def foreign_names(all_nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Maps each imported name of a file to the module, class or function of another package."""
    found = dict[str, str]()
    for node in all_nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[(alias.asname or alias.name).split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function, arguments = node.value.func, node.value.args
            named = arguments and isinstance(arguments[0], ast.Constant)
            if (
                ast.unparse(function).endswith("import_module")
                and named
                and isinstance(node.targets[0], ast.Name)
            ):
                found[node.targets[0].id] = str(ast.literal_eval(arguments[0]))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
            found |= {
                target.id: found[node.value.id] for target in node.targets if isinstance(target, ast.Name)
            }
    parameters = {node.arg for node in all_nodes if isinstance(node, ast.arg)}
    others = {name for name in found.values() if name.split(".")[0] in OWN | set(sys.stdlib_module_names)}
    return {name: origin for name, origin in found.items() if origin not in others and name not in parameters}


def stored(all_nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.expr, str]]:
    """Yields the object and the attribute in each assignment to an attribute."""
    for node in all_nodes:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "setattr",
            "delattr",
            "object.__setattr__",
        ):
            name = node.args[1]
            yield node.args[0], str(name.value) if isinstance(name, ast.Constant) else "..."
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(one, ast.Attribute):
                    yield one.value, one.attr


def replaced_in(text: str, all_nodes: Sequence[ast.AST]) -> list[str]:
    """Returns the full names of the symbols that a file replaces."""
    names = foreign_names(all_nodes)
    found = []
    for owner, attribute in stored(all_nodes):
        base, *rest = ast.unparse(owner).split(".")
        if base in names:
            found.append(".".join((names[base], *rest, attribute)))
    if "sys.meta_path" in text:
        found += [
            ast.unparse(n)
            for n in all_nodes
            if isinstance(n, ast.Call) and "sys.meta_path." in ast.unparse(n.func)
        ]
    return sorted(set(found) - SETTINGS)


def is_bridge(path: str) -> bool:
    return any(path == bridge or path.startswith(f"{bridge}/") for bridge in BRIDGES)


def test_foreign_symbols_are_replaced_in_bridges_only() -> None:
    found = {
        path: replaced
        for file in package_files()
        if not is_bridge(path := file.as_posix())
        and (replaced := replaced_in((ROOT / file).read_text(encoding="utf-8"), nodes(file)))
    }
    # These finders find modules of this project under the import paths of slime and of upstream vime.
    finders = {
        "slime/system/upstream.py": ["sys.meta_path.append(Finder())"],
        "vime/alias.py": ["sys.meta_path.insert(0, Alias())"],
    }
    assert found == finders, "add a record to the bridge of the program"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from vllm.a import B\nB.method = f", "vllm.a.B.method"),
        ("import torch\ntorch.cuda.current_device = f", "torch.cuda.current_device"),
        ("import ray._private.node as n\nsetattr(n.Node, 'start', f)", "ray._private.node.Node.start"),
        ("from megatron import core\n(core.a, x) = f, 1", "megatron.core.a"),
        ("def g():\n    from vllm import m\n    del m.name", "vllm.m.name"),
        ("m = import_module('vllm.platforms')\nm.current = f", "vllm.platforms.current"),
        ("import torch\nlibrary = torch\nlibrary.cuda.x = f", "torch.cuda.x"),
    ],
)
def test_each_way_to_replace_is_found(code: str, name: str) -> None:
    assert replaced_in(code, [*ast.walk(ast.parse(code))]) == [name]


@pytest.mark.parametrize(
    "code", ["from slime import a\na.b = 1", "import sys\nsys.stdout = f", "x = f()\nx.y = 1"]
)
def test_own_objects_are_no_matter(code: str) -> None:
    assert replaced_in(code, [*ast.walk(ast.parse(code))]) == []


def test_fewer_symbols_of_vllm_are_replaced_than_the_bar() -> None:
    assert len(patches.TABLES["vllm"]) <= MOST_OF_VLLM


@pytest.mark.parametrize("package", sorted(patches.TABLES))
def test_every_record_is_whole(package: str) -> None:
    seen = set[str]()
    for patch in patches.TABLES[package]:
        assert patch.symbol not in seen, "one record for each symbol"
        seen.add(patch.symbol)
        SpecifierSet(patch.versions)
        module, _, name = patch.replacement.partition(":")
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            patch.replacement
        )


@pytest.mark.parametrize("package", ["ray", "megatron-core", "torch", "datasets"])
def test_the_symbols_exist(package: str) -> None:
    missing = [patch.symbol for patch in patches.TABLES[package] if not bridges.exists(patch)]
    assert missing == []


@pytest.mark.slow
def test_another_programs_server_keeps_its_vllm() -> None:
    """vLLM loads the plug-in in every server of the environment, so other programs' servers must stay
    unchanged."""
    program = (
        "import os; os.environ.pop('VIME_SUPERVISED', None)\n"
        "from vime.vllm.worker.plugin import register; register()\n"
        "from slime import bridges; from vime.doctor.patches import TABLES\n"
        "print([p.symbol for p in TABLES['vllm'] if bridges.is_applied(p)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[]"
