"""Tests the layout rules of the house: sizes, import direction, no import rings, heavy libraries only in allowed
files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from house_tree import PACKAGES, ROOT, files, imported, module_name, nodes, package_files, parse

from slime.algo.estimators import ESTIMATORS
from slime.algo.losses import LOSSES
from vime import alias

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 20
MAX_KERNEL_LINES = 150

MAY_IMPORT = {
    "rl_kernel": {"rl_kernel"},
    "slime": {"rl_kernel", "slime"},
    "vime": {"rl_kernel", "slime", "vime"},
}

# Each library that not every machine has, with the files of the packages that may import it.
HEAVY = {
    "megatron": (
        "slime/megatron_backend/",
        "slime/bridges/",
        "slime/config/megatron_flags.py",
    ),
    "ray": ("slime/bridges/", "slime/cluster/", "vime/driver.py", "vime/pool/"),
    "vllm": ("vime/vllm/",),
    "vllm_router": ("vime/vllm/",),
    "vllm_router_rs": ("vime/vllm/",),
    "triton": ("rl_kernel/",),
}


MOST_ANY = {"rl_kernel": 35, "slime": 350, "vime": 100}
"""Highest number of uses of the word `Any` in each package, import lines left out. Lower it when the count falls."""
TOP_LEVEL = """
    .ci .dockerignore .gitignore .pre-commit-config.yaml CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in README.md
    SECURITY.md benchmarks docker docs examples mkdocs.yml pyproject.toml requirements rl_kernel scripts setup.py slime
    tests train.py train_async.py vime
"""
LARGEST_FILE_KIB = 400


def test_only_known_things_stand_at_the_top_level():
    """A data file once came into the repository with an unfinished commit."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [name for name in found.stdout.split("\0") if name and (ROOT / name).exists()]
    assert {name.partition("/")[0] for name in tracked} == set(TOP_LEVEL.split())
    large = {name for name in tracked if (ROOT / name).stat().st_size > LARGEST_FILE_KIB << 10}
    assert not large


def exceptions() -> set[str]:
    lines = (ROOT / "tests/house/exceptions.txt").read_text().splitlines()
    return {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in nodes(path) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def rings(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the cycles of a graph, found by depth-first search; the list is empty for a graph without cycles."""
    state: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        state[node] = 1
        path.append(node)
        for target in sorted(graph.get(node, ())):
            if state.get(target) == 1:
                found.append([*path[path.index(target) :], target])
            elif target not in state:
                visit(target)
        path.pop()
        state[node] = 2

    for node in sorted(graph):
        if node not in state:
            visit(node)
    return found


def module_graph() -> dict[str, set[str]]:
    """Maps each module to the modules of the packages that it imports, including imports in functions and for
    types.

    `from package import name` loads the package's __init__ first, unless it runs inside that package already.
    Counting that edge would make every `__init__` that re-exports its own modules a ring, which Python handles.
    """
    modules = {module_name(p) for p in package_files()}
    graph: dict[str, set[str]] = {}
    for path in package_files():
        here = module_name(path)
        targets = set()
        for name, _ in imported(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != here and not here.startswith(target + "."):
                targets.add(target)
        graph[here] = targets
    return graph


def test_file_sizes() -> None:
    sizes = {str(p): len((ROOT / p).read_text().splitlines()) for p in files(".py", ".sh", ".js", ".css")}
    over = {p: n for p, n in sizes.items() if n > MAX_FILE_LINES and p not in exceptions()}
    assert not over, f"files must have at most {MAX_FILE_LINES} lines: {over}"


def test_function_sizes() -> None:
    over = {}
    for path in files(".py"):
        cap = MAX_KERNEL_LINES if path.name == "kernels.py" else MAX_FUNCTION_LINES
        for node in functions(path):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > cap and f"{path}:{node.name}" not in exceptions():
                over[f"{path}:{node.name}"] = size
    assert not over, (
        f"functions must have at most {MAX_FUNCTION_LINES} lines (kernels {MAX_KERNEL_LINES}): {over}"
    )


def test_exceptions_name_things_that_exist() -> None:
    known = {str(p) for p in files(".py", ".sh", ".js", ".css")}
    known |= {f"{p}:{n.name}" for p in files(".py") for n in functions(p)}
    assert exceptions() <= known


def test_import_direction() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path in package_files()
        for name, line in imported(path)
        if name.split(".")[0] in PACKAGES and name.split(".")[0] not in MAY_IMPORT[path.parts[0]]
    ]
    assert not wrong, "imports must point one way, rl_kernel <- slime <- vime: " + "; ".join(wrong)


def test_annotations_say_any_seldom() -> None:
    counts = dict.fromkeys(PACKAGES, 0)
    for path in package_files():
        lines = (line for line in (ROOT / path).read_text().splitlines() if "import" not in line)
        counts[path.parts[0]] += sum(len(re.findall(r"\bAny\b", line)) for line in lines)
    over = {package: n for package, n in counts.items() if n > MOST_ANY[package]}
    assert not over, (
        f"the packages must say Any at most {MOST_ANY} times, got {over}; name the type, or object"
    )


def test_packages_do_not_import_tests_or_scripts() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path in package_files()
        for name, line in imported(path)
        if name.split(".")[0] in ("tests", "scripts", "pytest", "sglang")
        and (str(path), name) != ("vime/testing/plugin.py", "pytest")  # fixtures for users' tests
    ]
    assert not wrong, "; ".join(wrong)


def test_heavy_libraries_only_where_they_belong() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path in package_files()
        for name, line in imported(path)
        if (top := name.split(".")[0]) in HEAVY and not str(path).startswith(HEAVY[top])
    ]
    assert not wrong, "; ".join(wrong)


def test_folders_hold_one_trade() -> None:
    counted = [path for path in files() if path.parts[0] == "tests"]
    counted += [path for path in package_files() if path.name != "__init__.py"]
    sizes = Counter(str(path.parent) for path in counted)
    over = {folder: n for folder, n in sizes.items() if n > MAX_FOLDER_FILES}
    assert not over, f"folders of packages and tests must have at most {MAX_FOLDER_FILES} files: {over}"


def test_tests_lie_in_the_folders_of_what_they_test() -> None:
    """A test file has the name of its module, so each name occurs once. Folders of tests/rl_kernel, tests/slime
    and tests/vime mirror folders of the package. tests/vime/commands also has the tests of the modules directly
    in vime/: if tests/vime had a file, pytest would import its folders as packages named vllm and sglang."""
    tests = [path for path in files(".py") if path.parts[0] == "tests" and path.name != "conftest.py"]
    twice = [name for name, count in Counter(path.name for path in tests).items() if count > 1]
    assert not twice, f"a test file's name must be its own, got several of {twice}"
    mirrored = {path.parent.relative_to("tests") for path in tests if path.parts[1] in PACKAGES}
    assert not {str(folder) for folder in mirrored if not (ROOT / folder).is_dir()}
    assert Path("vime") not in mirrored


def test_a_class_of_vime_has_a_name_of_its_own() -> None:
    """A class of vime shares its name with no class of another file, in any package."""
    places: dict[str, set[str]] = {}
    for path in package_files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(str(path))
    twice = {n: at for n, at in places.items() if len(at) > 1 and any(p.startswith("vime/") for p in at)}
    assert not twice, f"one name must be one class, got {twice}; rename one"


def test_each_import_of_a_package_finds_its_module() -> None:
    """Imports of moved modules fail here, also in functions that no quick test calls."""
    modules = {module_name(path) for path in package_files()}
    modules |= {
        ".".join(parts[:end]) for parts in (m.split(".") for m in modules) for end in range(1, len(parts))
    }
    aliased = tuple(f"vime.{package}" for package in alias.PACKAGES)
    lost = [
        f"{path}:{line}: {name}"
        for path in files(".py")
        for name, line in imported(path)
        if name.split(".")[0] in PACKAGES and not name.startswith(aliased)
        if not {name, name.rpartition(".")[0]} & modules
    ]
    assert not lost, f"imports must name modules of the packages: {lost}"


def test_no_import_rings() -> None:
    """The import graph has no ring of files. It includes imports inside functions and imports for types."""
    assert not rings(module_graph())


def test_no_rings_of_folders() -> None:
    """The import graph has no ring of folders. A folder includes its subfolders, and a file directly in a package
    counts as a folder."""
    graph: dict[str, set[str]] = {}
    for here, targets in module_graph().items():
        for target in targets:
            a, b = folder_of(here), folder_of(target)
            if a != b:
                graph.setdefault(a, set()).add(b)
    assert not rings(graph)


def folder_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_rings_are_found() -> None:
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
    assert rings({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_utils_holds_no_code() -> None:
    """slime/utils only keeps the import paths of existing plug-ins; their code is in other folders."""
    for path in files(".py"):
        if path.parts[:2] == ("slime", "utils"):
            allowed = (ast.ImportFrom, ast.Import, ast.Expr, ast.Assign)
            assert all(isinstance(node, allowed) for node in parse(path).body), path


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_without_heavy_libraries(package: str) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(HEAVY)!r}))\n"  # imports of None raise
        f"import {package}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_setup_py_is_short() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) < 30


def names_compared(all_nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names of estimators and losses that a file uses in comparisons."""
    names = {*ESTIMATORS, *LOSSES}
    found = set()
    for node in all_nodes:
        starts = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith")
        if isinstance(node, ast.Compare | ast.MatchValue) or starts:
            texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            found |= {str(text) for text in texts if text in names}
    return found


def test_no_code_compares_names_of_estimators_and_losses():
    assert names_compared(ast.walk(ast.parse("x = c.kind == 'gspo' or c.kind in ('grpo', 'a')"))) == {
        "gspo",
        "grpo",
    }
    # benchmarks are left out, because grpo is also the name of an operator there
    looked_at = [p for p in package_files() if p.parts[0] != "rl_kernel"]
    found = {str(path): names_compared(nodes(path)) for path in looked_at}
    assert not {path: names for path, names in found.items() if names}


def test_slime_names_no_engine() -> None:
    """Flags and arguments of an engine belong to its backend in vime. slime keeps only the import paths that
    plug-ins use."""
    paths = re.compile(r"\b(vllm|sglang)_rollout\b")
    table = ROOT / "slime/system/upstream.py"  # the import paths that plug-ins use, also of engines
    name = re.compile(r"\b(vllm|sglang)_|--(vllm|sglang)-")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "slime").rglob("*.py"))
        if path != table
        for line in path.read_text().splitlines()
        if name.search(paths.sub("", line))
    ]
    assert not found, f"slime must name no flag of an engine, got {found}; put it in the backend"


def test_args_end_at_the_border():
    """`args` holds all flags for a user's functions. Inside, functions get sections (`slime.rollout.context`)."""
    found = []
    paths = [path for path in package_files() if path.parts[0] in ("slime", "vime")]
    # vime.types describes the functions of users, which take args. The other two have slime's functions with args.
    outside = ("types", "plug_ins", "observability")
    for path in sorted(path for path in paths if path.parent.name not in outside):
        for node in functions(path):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if any(one.arg == "args" for one in given) and node.name != "__torch_function__":
                found.append(f"{path} {node.name}")
    assert len(found) < 41, (
        f"functions must get a section instead of args, got {len(found)} with args: {found}"
    )
