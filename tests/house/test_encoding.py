"""Text files are UTF-8 in every locale: each `open`, `read_text` and `write_text` names the encoding."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest
from house_tree import files, nodes

BINARY, MODES = "b", set("rwaxbt+")


def without_encoding(all_nodes: Iterable[ast.AST]) -> list[int]:
    """Returns the lines of calls that open text in the encoding of the locale."""
    return [call.lineno for call in all_nodes if isinstance(call, ast.Call) and _in_locale(call)]


def _in_locale(call: ast.Call) -> bool:
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    function = call.func
    method = isinstance(function, ast.Attribute)
    name = function.attr if method else getattr(function, "id", "")
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    if name not in ("open", "fdopen"):
        return False
    if (
        method and name == "open"
    ):  # Path.open has no argument or a mode; other open methods read members of archives
        given = call.args[:1]
        if not all(isinstance(a, ast.Constant) and set(str(a.value)) <= MODES for a in given):
            return False
    else:
        given = call.args[1:2]
    given = [*given, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return not any(isinstance(a, ast.Constant) and BINARY in str(a.value) for a in given)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("open(p)", True),
        ("open(p, 'w')", True),
        ("open(p, mode='a')", True),
        ("p.open()", True),
        ("p.open('w')", True),
        ("p.read_text()", True),
        ("p.write_text(t)", True),
        ("os.fdopen(1, 'w')", True),
        ("open(p, 'rb')", False),
        ("open(p, encoding='utf-8')", False),
        ("p.open('wb')", False),
        ("wheel.open(name)", False),
        ("os.open(p, os.O_RDONLY)", False),
        ("p.read_text(encoding='utf-8')", False),
        ("p.write_text(t, 'utf-8')", False),
    ],
)
def test_what_is_found(code, found):
    assert bool(without_encoding(ast.walk(ast.parse(code)))) is found


def test_text_files_name_their_encoding():
    found = [
        f"{path}:{line}"
        for path in files(".py")
        if path.parts[0] != "tests"
        for line in without_encoding(nodes(path))
    ]
    assert not found, f"text must be read and written with encoding='utf-8': {found}"
