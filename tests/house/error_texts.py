"""Finds code that reads meaning from the text of an error, in place of a field of the error.

The text of an error is `str(error)`, `repr(error)`, `error.args`, or an f-string with the error in it, also under
another name and as an argument of another function of the project. A comparison, a search and a method that cuts or
replaces a part of a string read the text. Printing, storing and raising a text do not read it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

READS = {
    *(
        "startswith",
        "endswith",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "replace",
        "partition",
        "rpartition",
    ),
    *("split", "rsplit", "splitlines", "removeprefix", "removesuffix", "translate"),
}
"""Methods of a text that search, cut or replace a part."""
SEARCHES = {
    "search",
    "match",
    "fullmatch",
    "findall",
    "finditer",
    "sub",
    "subn",
    "split",
    "get_close_matches",
}
"""Functions and methods of patterns that get the text as an argument."""
KEEPS = {
    *("str", "repr", "strip", "lstrip", "rstrip", "lower", "upper", "casefold", "join", "fill", "shorten"),
    *("dict", "fromkeys", "list", "tuple", "set", "getattr"),
}
"""Calls whose result still is the text of an error if an argument is."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Reader:
    """One expression that reads an error's text."""

    path: str
    function: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.function}"


@dataclass(eq=False)
class _Place:
    """A function, or the top of a module, with the names of errors and of their texts in it."""

    path: str
    node: Function | ast.Module
    errors: set[str]
    texts: set[str]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(_own(self.node))

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<module>")


def readers(modules: dict[str, ast.Module]) -> list[Reader]:
    """All readers in the modules (path -> tree). A function that gets the text as an argument is followed."""
    of_errors = {
        node.name
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.returns and _is_error_type(_inner(ast.unparse(node.returns)))
    }
    places = [place for path, tree in modules.items() for place in _slots(path, tree, of_errors)]
    by_name: dict[str, list[_Place]] = defaultdict(list)
    for place in places:
        by_name[place.name].append(place)
    waiting, found = [place for place in places if place.errors], {}
    while waiting:
        place = waiting.pop()
        _spread(place)
        found.update(dict.fromkeys(_reads(place)))
        for other, name, is_error in _passed(place, by_name):
            names = other.errors if is_error else other.texts
            if name not in names:
                names.add(name)
                waiting.append(other)
    return sorted(found, key=lambda r: (r.path, r.function, r.code))


def _calls(value: ast.expr, names: set[str]) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") in names


def _slots(path: str, tree: ast.Module, of_errors: set[str]) -> Iterator[_Place]:
    """The functions of a module, and the module. `of_errors`: functions that return errors."""
    for node in [tree, *(n for n in ast.walk(tree) if isinstance(n, Function))]:
        nodes = list(_own(node))
        errors = {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
        errors |= {name for n in nodes for name, value in _bindings(n) if _calls(value, of_errors)}
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            errors |= {a.arg for a in arguments if a.annotation and _is_error_type(ast.unparse(a.annotation))}
        yield _Place(path, node, errors, set())


def _inner(annotation: str) -> str:
    """The type in `Iterator[...]` or a similar type."""
    return annotation.partition("[")[2].rstrip("]") if "[" in annotation else annotation


def _is_error_type(annotation: str) -> bool:
    return any(part.rpartition(".")[2].endswith(("Error", "Exception")) for part in annotation.split(" | "))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module without those of the functions in it. A nested function shares its names, so
    lambdas and comprehensions count."""
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, Function):
            waiting.extend(ast.iter_child_nodes(one))


def _spread(place: _Place) -> None:
    """Add the names to which texts and errors are assigned, until nothing is added."""
    size = -1
    while size != len(place.errors) + len(place.texts):
        size = len(place.errors) + len(place.texts)
        for node in place.nodes:
            for target, value in _bindings(node):
                if _is_error(value, place):
                    place.errors.add(target)
                elif _is_text(value, place):
                    place.texts.add(target)


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of each assignment. The name of a loop is bound to its sequence."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
            pairs = zip(names, values, strict=False)
            yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))
    elif isinstance(node, ast.NamedExpr):
        yield node.target.id, node.value
    elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
        yield node.target.id, node.iter


def _is_error(node: ast.AST | None, place: _Place) -> bool:
    if isinstance(node, ast.Name):
        return node.id in place.errors
    return isinstance(node, ast.Attribute) and (
        node.attr in ("__cause__", "__context__") or (node.attr == "cause" and _is_error(node.value, place))
    )


def _is_text(node: ast.AST | None, place: _Place) -> bool:
    """Return True if an expression is the text of an error, or has it as a part."""
    match node:
        case ast.Name(id=name):
            return name in place.texts
        case ast.Attribute(value=value, attr="args"):
            return _is_error(value, place)
        case ast.JoinedStr(values=values):
            inside = [v.value for v in values if isinstance(v, ast.FormattedValue)]
            return any(_is_error(v, place) or _is_text(v, place) for v in inside)
        case ast.Call(func=func, args=args):
            name = getattr(func, "id", getattr(func, "attr", ""))
            if name in ("str", "repr", "format_exception", "format_exception_only") and any(
                _is_error(a, place) for a in args
            ):
                return True
            owner = [func.value] if isinstance(func, ast.Attribute) else []
            return name in KEEPS and any(_is_text(a, place) for a in [*owner, *args])
        case (
            ast.BinOp()
            | ast.BoolOp()
            | ast.IfExp()
            | ast.List()
            | ast.Tuple()
            | ast.Set()
            | ast.Starred()
            | ast.GeneratorExp()
            | ast.ListComp()
        ):
            return any(
                _is_text(child, place) for child in ast.iter_child_nodes(node) if not _is_test(node, child)
            )
        case ast.Subscript(value=value):
            return _is_text(value, place)
    return False


def _is_test(node: ast.AST, child: ast.AST) -> bool:
    return isinstance(node, ast.IfExp) and child is node.test


def _reads(place: _Place) -> Iterator[Reader]:
    for node in place.nodes:
        if _is_reader(node, place):
            yield Reader(place.path, place.name, " ".join(ast.unparse(node).split()))


def _is_reader(node: ast.AST, place: _Place) -> bool:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            known = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
            return any(isinstance(op, known) for op in ops) and any(
                _is_text(n, place) for n in [left, *others]
            )
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=args):
            if name in READS and _is_text(value, place):
                return True
            return name in SEARCHES and any(_is_text(a, place) for a in args)
    return False


def _passed(place: _Place, by_name: dict[str, list[_Place]]) -> Iterator[tuple[_Place, str, bool]]:
    """(function, parameter, whether it is an error) of each call that gets an error or the text of one."""
    for node in place.nodes:
        if not isinstance(node, ast.Call):
            continue
        given = [*enumerate(node.args), *((k.arg, k.value) for k in node.keywords if k.arg)]
        for where, value in given:
            is_error = _is_error(value, place)
            if not is_error and not _is_text(value, place):
                continue
            other = _called(node.func, place, by_name)
            parameter = other and _parameter(other.node, where)
            if other and parameter:
                yield other, parameter, is_error


def _called(func: ast.expr, place: _Place, by_name: dict[str, list[_Place]]) -> _Place | None:
    """The function of the project that a call reaches: one of the same module, or the only one of its name."""
    of_self = (
        isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id in ("self", "cls")
    )
    if not of_self and not isinstance(func, ast.Name):
        return None
    named = by_name.get(getattr(func, "id", getattr(func, "attr", "")), [])
    here = [other for other in named if other.path == place.path]
    if here or of_self:
        return here[0] if here else None
    return named[0] if len(named) == 1 else None


def _parameter(node: ast.AST, where: int | str) -> str | None:
    if not isinstance(node, Function):
        return None
    if isinstance(where, str):
        return where
    names = [a.arg for a in [*node.args.posonlyargs, *node.args.args]]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    if where < len(names):
        return names[where]
    return node.args.vararg.arg if node.args.vararg else None
