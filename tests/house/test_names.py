"""Tests the names of the packages: the field's words, functions that are verbs, and one class per name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from house_tree import nodes, package_files, parse

BANNED = {
    *(
        "told",
        "tells",
        "said",
        "hears",
        "hear",
        "knows",
        "know",
        "lent",
        "stands",
        "place",
        "places",
        "drawn",
    ),
    *("room", "rooms", "fleet", "given", "apart", "beside"),
}
"""Words that do not name the content of a value. Use the words of the glossary in CONTRIBUTING.md."""

BANNED_IN_CLASSES = frozenset(["kept", "turns", "wanted", "live", "known"])
"""Further words that no class may have in its name."""

ALLOWED = {
    "place": "key of the saved samples and of the engine's answers, and a slot of a lane",
    "said": "key of the saved session record, and a text of a log that the post-mortem searches",
    "in_place": "a change of a tensor in its own storage",
    "KeptTokens": "the tokens that sampling kept, as in --replay-kept-tokens",
    "LiveAnswer": "an answer while the engine still generates it",
    "LiveModel": "the model that an engine serves",
    "LiveRun": "a run that is not yet over, for a notebook",
    "WantedOutput": "fields of a request of SGLang's wire",
    "WantedRun": "the settings of a run that vime doctor checks",
}
"""Names with such a word, each with the reason."""

OF = re.compile(r"_*of_\w+|\w+_of")
ALLOWED_OF: dict[str, str] = {}

TWICE = {"Connector": "each file of slime/environments/connectors has a class with the name of the protocol"}
"""Class names with several definitions, each with the reason."""


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def bound(all_nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yields (kind, name) for each name that the module binds: functions, classes, parameters, variables, fields."""
    for node in all_nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "function", node.name
        elif isinstance(node, ast.ClassDef):
            yield "class", node.name
        elif isinstance(node, ast.arg):
            yield "parameter", node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "variable", node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "field", node.attr


def test_names_have_the_words_of_the_field() -> None:
    found = set()
    for path in package_files():
        for kind, name in bound(nodes(path)):
            banned = BANNED | BANNED_IN_CLASSES if kind == "class" else BANNED
            if banned & words(name) and name not in ALLOWED:
                found.add(f"{path}: {kind} {name}")
    assert not found, f"names must use the field's words (CONTRIBUTING.md), got {sorted(found)}"


def test_functions_are_verbs() -> None:
    found = {
        f"{path}: {name}"
        for path in package_files()
        for kind, name in bound(nodes(path))
        if kind == "function" and OF.fullmatch(name) and name not in ALLOWED_OF
    }
    assert not found, f"functions must be named verb_noun, from_x or x_for, got {sorted(found)}"


def test_a_class_name_is_defined_once() -> None:
    locations = defaultdict(set)
    for path in package_files():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                locations[node.name].add(str(path))
    twice = {name: sorted(paths) for name, paths in locations.items() if len(paths) > 1}
    assert twice.keys() == TWICE.keys(), twice


def test_the_allowed_names_exist() -> None:
    names = {name for path in package_files() for _, name in bound(nodes(path))}
    assert ALLOWED.keys() | ALLOWED_OF.keys() <= names


def test_the_readers_find_names() -> None:
    """The readers above find names in source with known content."""
    tree = ast.parse("class Kept:\n    x: int = 0\n\ndef of_a(told, b=1):\n    self.place, y = 1, 2\n")
    assert {("class", "Kept"), ("function", "of_a"), ("parameter", "told"), ("field", "place")} <= set(
        bound(ast.walk(tree))
    )
    assert (
        words("_IS_GivenUp") == {"is", "given", "up"}
        and OF.fullmatch("flag_of")
        and not OF.fullmatch("office")
    )
