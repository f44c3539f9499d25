"""Takes from a script the statements that given names need, without running the script."""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """A statement of the script, and the names that it binds and reads."""

    node: ast.stmt
    text: str
    binds: frozenset[str]
    reads: frozenset[str]


def statements(source: str, tree: ast.Module, inside: Sequence[ast.stmt]) -> list[Statement]:
    """Returns the statements of a module in order. Those inside `inside`, a function or an `if`, follow the others
    without their indentation."""
    outer = [node for node in tree.body if node not in inside and not _is_main(node)]
    found = [_statement(source, node) for node in outer]
    for block in inside:
        found += [_statement(source, node) for node in getattr(block, "body", [])]
    return found


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in {
        one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)
    }


def _statement(source: str, node: ast.stmt) -> Statement:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    text = textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
    if isinstance(node, ast.Return):
        return Statement(node, text, frozenset(), frozenset())
    table = symtable.symtable(ast.unparse(node), "script", "exec")
    binds = {one.get_name() for one in table.get_symbols() if _is_bound(one)}
    return Statement(node, text, frozenset(binds | set(_changed(node))), frozenset(_read(table)))


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _read(table: symtable.SymbolTable) -> Iterator[str]:
    """Yields the names of the module that a statement reads, also inside its functions."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _read(child)


def _changed(node: ast.stmt) -> Iterator[str]:
    """Yields names whose objects a statement changes: `rows["x"] = ...`, `rows.append(...)`."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        targets = [node.value.func]
    for target in targets:
        inner = target
        while isinstance(inner, ast.Attribute | ast.Subscript):
            inner = inner.value
        if isinstance(inner, ast.Name) and inner is not target:
            yield inner.id


def needed(found: Sequence[Statement], names: set[str]) -> tuple[list[Statement], set[str]]:
    """Returns the statements that the names need, in order, and the names that no statement binds."""
    wanted, chosen = set(names), set[int]()
    grew = True
    while grew:
        grew = False
        for i, statement in enumerate(found):
            if i not in chosen and statement.binds & wanted:
                chosen.add(i)
                wanted |= statement.reads
                grew = True
    bound = {name for i in chosen for name in found[i].binds}
    return [found[i] for i in sorted(chosen)], wanted - bound - set(dir(builtins)) - {"__file__", "__name__"}


def join_statements(chosen: Sequence[Statement], names: set[str]) -> str:
    """Returns the source of the statements. An import has only the names that are read."""
    read = names.union(*(one.reads for one in chosen))
    parts = list[str]()
    before: ast.stmt | None = None
    for one in chosen:
        text = one.text
        if isinstance(one.node, ast.Import | ast.ImportFrom):
            kept = [n for n in one.node.names if (n.asname or n.name.partition(".")[0]) in read]
            text = ast.unparse(type(one.node)(**{**vars(one.node), "names": kept}))
        blocks = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        is_block = isinstance(one.node, blocks) or isinstance(before, blocks)
        parts.append("\n\n" + text if is_block and before is not None else text)
        before = one.node
    return "\n".join(parts) + "\n"
