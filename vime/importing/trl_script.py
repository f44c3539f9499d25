"""Reads a script of TRL: the settings of its GRPOConfig, and the model, rewards and data of its GRPOTrainer."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.records.errors import FlagError
from vime.importing.settings import Setting
from vime.importing.slices import Statement, statements

CONFIGS = ("GRPOConfig", "RLOOConfig")
TRAINERS = ("GRPOTrainer", "RLOOTrainer")
_OPERATORS: Mapping[type, Callable[[object, object], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


class Unknown(Exception):
    """An expression whose value only a run of the script has."""


@dataclass
class Script:
    """A script: its statements before the trainer, the trainer's arguments, and the settings."""

    path: Path
    statements: list[Statement]
    arguments: dict[str, ast.expr]
    settings: list[Setting] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    """Settings whose value is an expression that was not evaluated: name, and source."""
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def value(self, node: ast.expr) -> object:
        """Returns the value of an expression of constants. Raises Unknown for any other expression."""
        return _value(node, self.constants, 0)


def read_script(path: Path) -> Script:
    """Reads a script. Raises ValueError for a file that is no script of TRL's GRPOTrainer."""
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError) as error:
        raise FlagError(str(path), "be a Python script", error, "check the file") from error
    trainer = _call(tree, TRAINERS)
    if trainer is None:
        raise FlagError(
            str(path), f"call {' or '.join(TRAINERS)}", "no such call", "give the script that trains"
        )
    inside = [node for node in tree.body if _holds(node, trainer) and hasattr(node, "body")]
    before = [one for one in statements(source, tree, inside) if not _holds(one.node, trainer)]
    names = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
    arguments = dict(zip(names, trainer.args, strict=False))
    arguments |= {one.arg or "**": one.value for one in trainer.keywords}
    script = Script(path, before, arguments, constants=_constants(before))
    config = _call(tree, CONFIGS)
    if config is not None:
        for keyword in config.keywords:
            _read(script, keyword.arg, keyword.value)
    return script


def _read(script: Script, name: str | None, node: ast.expr) -> None:
    try:
        value = script.value(node)
    except Unknown:
        script.unread.append((name or "**", ast.unparse(node)))
        return
    where = f"{script.path.name}, line {node.lineno}"
    entries = {name: value} if name is not None else value
    if isinstance(entries, dict):
        script.settings += [Setting(str(each), one, where) for each, one in entries.items()]


def _call(tree: ast.AST, names: Sequence[str]) -> ast.Call | None:
    """Returns the first call of one of these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and call_name(node) in names:
            return node
    return None


def call_name(node: ast.expr) -> str:
    """Returns the last name of a call's function, or ""."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _holds(node: ast.AST, inner: ast.AST) -> bool:
    return any(one is inner for one in ast.walk(node))


def _constants(found: Sequence[Statement]) -> dict[str, ast.expr]:
    """Returns the names that one assignment alone binds."""
    assigned: dict[str, list[ast.expr]] = {}
    for one in found:
        node = one.node
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            assigned.setdefault(node.target.id, []).append(node.value)
    return {name: values[0] for name, values in assigned.items() if len(values) == 1}


def _value(node: ast.expr, constants: Mapping[str, ast.expr], depth: int) -> object:
    if depth > 20:
        raise Unknown

    def inner(one: ast.expr) -> object:
        return _value(one, constants, depth + 1)

    if isinstance(node, ast.Name) and node.id in constants:
        return inner(constants[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        try:
            return _OPERATORS[type(node.op)](inner(node.left), inner(node.right))
        except (TypeError, ArithmeticError) as error:
            raise Unknown from error
    if isinstance(node, ast.JoinedStr):
        parts = [inner(one.value if isinstance(one, ast.FormattedValue) else one) for one in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.List | ast.Tuple):
        return [inner(one) for one in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [key for key in node.keys if key is not None]
        return {inner(key): inner(one) for key, one in zip(keys, node.values, strict=True)}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise Unknown from error
